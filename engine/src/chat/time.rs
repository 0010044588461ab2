//! `strftime_now`: formats dates as C's `strftime` does in the English locale.

use alloc::format;
use alloc::string::String;

/// A calendar date and time of day.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// Year of the Gregorian calendar.
    pub year: i32,
    /// Month, 1 to 12.
    pub month: u8,
    /// Day of the month, 1 to 31.
    pub day: u8,
    /// Hour, 0 to 23.
    pub hour: u8,
    /// Minute, 0 to 59.
    pub minute: u8,
    /// Second, 0 to 59.
    pub second: u8,
}

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
#[rustfmt::skip]
const MONTHS: [&str; 12] = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
];

impl Now {
    /// From seconds since 1970-01-01 00:00:00 UTC.
    pub fn from_unix(seconds: i64) -> Now {
        let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
        // civil calendar from a day count, with years that start in March
        let days = days + 719_468;
        let era = days.div_euclid(146_097);
        let day_of_era = days.rem_euclid(146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted = (5 * day_of_year + 2) / 153;
        let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
        Now {
            year: (year_of_era + era * 400 + i64::from(month <= 2)) as i32,
            month: month as u8,
            day: (day_of_year - (153 * shifted + 2) / 5 + 1) as u8,
            hour: (second / 3600) as u8,
            minute: (second / 60 % 60) as u8,
            second: (second % 60) as u8,
        }
    }

    /// Formats the time. Unknown directives are copied.
    pub fn format(&self, format: &str) -> String {
        let month_name = MONTHS.get(usize::from(self.month).wrapping_sub(1)).copied().unwrap_or("?");
        let day_name = DAYS[self.weekday()];
        let hour12 = (u16::from(self.hour) + 11) % 12 + 1;
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            match chars.next() {
                Some('Y') => out += &format!("{}", self.year),
                Some('y') => out += &format!("{:02}", self.year.rem_euclid(100)),
                Some('m') => out += &format!("{:02}", self.month),
                Some('d') => out += &format!("{:02}", self.day),
                Some('e') => out += &format!("{:2}", self.day),
                Some('H') => out += &format!("{:02}", self.hour),
                Some('I') => out += &format!("{hour12:02}"),
                Some('M') => out += &format!("{:02}", self.minute),
                Some('S') => out += &format!("{:02}", self.second),
                Some('p') => out += if self.hour < 12 { "AM" } else { "PM" },
                Some('B') => out += month_name,
                Some('b') => out += &month_name[..month_name.len().min(3)],
                Some('A') => out += day_name,
                Some('a') => out += &day_name[..3],
                Some('F') => out += &format!("{}-{:02}-{:02}", self.year, self.month, self.day),
                Some('T') => out += &format!("{:02}:{:02}:{:02}", self.hour, self.minute, self.second),
                Some('%') => out.push('%'),
                Some(other) => out.extend(['%', other]),
                None => out.push('%'),
            }
        }
        out
    }

    /// Days since Sunday.
    fn weekday(&self) -> usize {
        let (month, early) = (usize::from(self.month.clamp(1, 12)), self.month <= 2);
        let shift = [0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4][month - 1];
        let year = i64::from(self.year) - i64::from(early);
        let leaps = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
        (year + leaps + shift + i64::from(self.day)).rem_euclid(7) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Python: `(datetime(1970, 1, 1) + timedelta(seconds=t)).strftime(format)`.
    #[test]
    fn equal_to_python() {
        let cases = [
            (0, "1970-01-01 00:00:00|Thu Thursday| 1 Jan January|12 AM|70"),
            (-1, "1969-12-31 23:59:59|Wed Wednesday|31 Dec December|11 PM|69"),
            (951_782_400, "2000-02-29 00:00:00|Tue Tuesday|29 Feb February|12 AM|00"),
            (1_709_164_799, "2024-02-28 23:59:59|Wed Wednesday|28 Feb February|11 PM|24"),
            (1_709_164_800, "2024-02-29 00:00:00|Thu Thursday|29 Feb February|12 AM|24"),
            (1_709_208_000, "2024-02-29 12:00:00|Thu Thursday|29 Feb February|12 PM|24"),
            (4_102_444_799, "2099-12-31 23:59:59|Thu Thursday|31 Dec December|11 PM|99"),
            (-2_208_988_801, "1899-12-31 23:59:59|Sun Sunday|31 Dec December|11 PM|99"),
            (253_402_300_799, "9999-12-31 23:59:59|Fri Friday|31 Dec December|11 PM|99"),
        ];
        for (seconds, expected) in cases {
            let now = Now::from_unix(seconds);
            assert_eq!(now.format("%Y-%m-%d %H:%M:%S|%a %A|%e %b %B|%I %p|%y"), expected, "{seconds}");
            assert_eq!(now.format("%F %T"), expected[..19], "{seconds}");
        }
    }

    #[test]
    fn other_text_is_copied() {
        let now = Now::from_unix(0);
        assert_eq!(now.format("100%% é %Q%"), "100% é %Q%");
        assert_eq!(now.format(""), "");
    }

    proptest! {
        #[test]
        fn days_follow_each_other(day in -800_000i64..3_000_000) {
            let (today, next) = (Now::from_unix(day * 86_400), Now::from_unix((day + 1) * 86_400));
            prop_assert_eq!((today.weekday() + 1) % 7, next.weekday());
            let date = |now: Now| (now.year, now.month, now.day);
            let (year, month, _) = date(today);
            let new_year = if month == 12 { (year + 1, 1, 1) } else { (year, month + 1, 1) };
            prop_assert!(date(next) == (year, month, today.day + 1) || date(next) == new_year);
        }

        #[test]
        fn any_fields_and_any_format(
            (year, month, day) in (any::<i32>(), any::<u8>(), any::<u8>()),
            (hour, minute, second) in (any::<u8>(), any::<u8>(), any::<u8>()),
            format in "(%?[A-Za-z%]| |é){0,12}",
        ) {
            Now { year, month, day, hour, minute, second }.format(&format);
        }
    }
}
