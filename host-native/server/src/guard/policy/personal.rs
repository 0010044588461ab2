//! Kinds of personal data: a pattern for candidates, and a check of the matched text where the pattern is not enough.

use std::net::Ipv4Addr;

use serde::Deserialize;

use super::tracker::Validator;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// `local@domain.tld`; letters are ASCII or Latin (U+00C0 to U+024F).
    Email,
    /// E.164 (`+49 30 1234567`, `0049 …`), national numbers with a leading 0, and North American 3-3-4 groups.
    Phone,
    /// 13 to 19 digits with the Luhn checksum, of the networks whose numbers begin with 2 to 6.
    CreditCard,
    /// ISO 13616, in capitals, with or without spaces: country, length and the mod 97 checksum.
    Iban,
    /// Four decimal octets without leading zeros.
    Ipv4,
}

impl Kind {
    pub(super) const ALL: [Kind; 5] = [Kind::Email, Kind::Phone, Kind::CreditCard, Kind::Iban, Kind::Ipv4];

    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Email => "email",
            Kind::Phone => "phone",
            Kind::CreditCard => "credit-card",
            Kind::Iban => "iban",
            Kind::Ipv4 => "ipv4",
        }
    }

    /// Candidates. Matches begin at word boundaries where that is possible: fewer positions of long words are followed.
    pub(super) fn pattern(self) -> &'static str {
        match self {
            Kind::Email => {
                r"(?x)
                (?:\b[A-Za-z0-9_]|[.%+'À-ɏ-])[A-Za-z0-9_.%+'À-ɏ-]{0,63}
                @(?:[A-Za-z0-9À-ɏ](?:[A-Za-z0-9À-ɏ-]{0,61}[A-Za-z0-9À-ɏ])?\.)+[A-Za-z]{2,24}"
            }
            Kind::Phone => {
                r"(?x)
                \+[\ (]?[1-9](?:[\ ./()-]{0,2}[0-9]){7,14}\b
                |(?:\(|\b)0(?:[\ ./()-]{0,2}[0-9]){7,16}\b
                |(?:\b1[\ .-]?)?(?:\([2-9][0-9]{2}\)\ ?|\b[2-9][0-9]{2}[\ .-])[0-9]{3}[\ .-][0-9]{4}\b"
            }
            Kind::CreditCard => r"\b[2-6](?:[ -]?[0-9]){12,18}\b",
            Kind::Iban => r"\b[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]){11,30}\b",
            Kind::Ipv4 => r"\b[0-9]{1,3}(?:\.[0-9]{1,3}){3}\b",
        }
    }

    pub(super) fn validator(self) -> Option<Validator> {
        match self {
            Kind::Email => None,
            Kind::Phone => Some(is_phone),
            Kind::CreditCard => Some(is_credit_card),
            Kind::Iban => Some(is_iban),
            Kind::Ipv4 => Some(|text| text.parse::<Ipv4Addr>().is_ok()),
        }
    }
}

/// Luhn: from the right every second digit is doubled, its digits added; the sum is a multiple of 10 (ISO/IEC 7812-1).
fn is_credit_card(text: &str) -> bool {
    let digits = text.bytes().rev().filter(u8::is_ascii_digit).map(|byte| u32::from(byte - b'0'));
    let add = |(n, sum), digit: u32| {
        let value = if n % 2 == 1 { digit * 2 } else { digit };
        (n + 1, sum + value / 10 + value % 10)
    };
    let (n_digits, sum) = digits.fold((0, 0), add);
    (13..=19).contains(&n_digits) && sum % 10 == 0
}

/// Lengths of IBANs by country (SWIFT IBAN registry).
const IBAN_LENGTHS: &[(usize, &str)] = &[
    (15, "NO"),
    (16, "BE"),
    (18, "DK FO FI GL NL SD FK"),
    (19, "MK SI"),
    (20, "AT BA EE KZ XK LT LU MN"),
    (21, "CR HR LV LI CH"),
    (22, "BH BG GE DE IE ME RS GB VA"),
    (23, "TL GI IQ IL OM SO AE"),
    (24, "AD CZ MD PK RO SA SK ES SE TN VG"),
    (25, "LY PT ST"),
    (26, "IS TR"),
    (27, "BI DJ FR GR IT MR MC SM"),
    (28, "AL AZ BY CY DO SV GT HU LB NI PL"),
    (29, "BR EG PS QA UA"),
    (30, "JO KW MU YE"),
    (31, "MT SC"),
    (32, "LC"),
    (33, "RU"),
];

/// The number, rotated by four characters, with letters as 10 to 35, is 1 modulo 97 (ISO 7064).
fn is_iban(text: &str) -> bool {
    let compact: Vec<u8> = text.bytes().filter(u8::is_ascii_alphanumeric).collect();
    let (Some(country), Some(head)) = (compact.get(..2), compact.get(..4)) else { return false };
    let is_country = |&&(_, countries): &&(usize, &str)| countries.split(' ').any(|code| code.as_bytes() == country);
    if IBAN_LENGTHS.iter().find(is_country).is_none_or(|(length, _)| *length != compact.len()) {
        return false;
    }
    let rotated = compact[4..].iter().chain(head);
    let remainder = rotated.fold(0u32, |remainder, &byte| match byte {
        b'0'..=b'9' => (remainder * 10 + u32::from(byte - b'0')) % 97,
        _ => (remainder * 100 + u32::from(byte.to_ascii_uppercase() - b'A') + 10) % 97,
    });
    remainder == 1
}

/// Parentheses, and the number of digits of national and international numbers.
fn is_phone(text: &str) -> bool {
    let count = |wanted: u8| text.bytes().filter(|byte| *byte == wanted).count();
    if count(b'(') > 1 || count(b'(') != count(b')') || is_date(text) {
        return false;
    }
    let mut digits = text.bytes().filter(u8::is_ascii_digit);
    let n_digits = digits.clone().count();
    match (text.starts_with('+'), digits.next(), digits.next()) {
        (true, ..) => (8..=15).contains(&n_digits),
        (false, Some(b'0'), Some(b'0')) => digits.next() != Some(b'0') && (10..=17).contains(&n_digits),
        (false, Some(b'0'), _) => (8..=12).contains(&n_digits),
        // North American: the pattern is enough
        _ => true,
    }
}

/// Whether the text begins like `01.02.2024`.
fn is_date(text: &str) -> bool {
    let bytes = text.as_bytes();
    let is_separator = |byte: u8| matches!(byte, b'.' | b'/' | b'-');
    let are_digits = |part: &[u8]| part.iter().all(u8::is_ascii_digit);
    match bytes {
        [d1, d2, s1, m1, m2, s2, rest @ ..] if s1 == s2 && is_separator(*s1) && are_digits(&[*d1, *d2, *m1, *m2]) => {
            rest.iter().take_while(|byte| byte.is_ascii_digit()).count() == 4
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::rules::{Action, PersonalData};
    use super::super::{Policy, PolicyFile, Stage, Verdict};
    use super::*;

    /// `text` with the matches of a kind replaced by `#`.
    fn redacted(kind: Kind, text: &str) -> String {
        let on = vec![Stage::Prompt];
        let personal = PersonalData { kinds: vec![kind], max: 0, on, action: Action::Redact, replacement: "#".into() };
        let file = PolicyFile { personal_data: Some(personal), ..PolicyFile::default() };
        match Policy::new(&file).unwrap().filter(Stage::Prompt).check(text) {
            Verdict::Redacted { text, .. } => text,
            Verdict::Unchanged => text.into(),
            Verdict::Blocked { .. } => unreachable!(),
        }
    }

    fn check(kind: Kind, texts: &[(&str, &str)]) {
        for (text, expected) in texts {
            assert_eq!(redacted(kind, text), *expected, "{kind:?} in {text:?}");
        }
    }

    #[test]
    fn email() {
        check(
            Kind::Email,
            &[
                ("write to max.m+x@mail.example.org.", "write to #."),
                ("<Jörg@müller.de>, é@b.fr", "<#>, #"),
                ("a@b.c, @b.co, a@, a@-b.co, a@b", "a@b.c, @b.co, a@, a@-b.co, a@b"),
                ("user@host_a", "user@host_a"),
            ],
        );
    }

    #[test]
    fn credit_card() {
        check(
            Kind::CreditCard,
            &[
                ("4111 1111 1111 1111, 378282246310005", "#, #"),
                ("5555-5555-5555-4444!", "#!"),
                ("6011000990139424 12", "# 12"),
                ("4111 1111 1111 1112", "4111 1111 1111 1112"),
                ("94111111111111111", "94111111111111111"),
                ("0000 0000 0000 0000", "0000 0000 0000 0000"),
            ],
        );
    }

    #[test]
    fn iban() {
        check(
            Kind::Iban,
            &[
                ("DE89 3704 0044 0532 0130 00", "#"),
                ("DE89370400440532013000 IS MINE", "# IS MINE"),
                ("GB82WEST12345698765432, NO9386011117947", "#, #"),
                ("FR14 2004 1010 0505 0001 3M02 606 (FR)", "# (FR)"),
                ("DE89 3704 0044 0532 0130 01", "DE89 3704 0044 0532 0130 01"),
                ("DE8937040044053201300", "DE8937040044053201300"),
            ],
        );
    }

    #[test]
    fn ipv4() {
        check(
            Kind::Ipv4,
            &[
                ("ping 192.168.0.1:80", "ping #:80"),
                ("256.1.1.1, 1.2.3, 01.2.3.4", "256.1.1.1, 1.2.3, 01.2.3.4"),
                ("255.255.255.255", "#"),
            ],
        );
    }

    #[test]
    fn phone() {
        check(
            Kind::Phone,
            &[
                ("call +49 30 1234567 now", "call # now"),
                ("+14155552671, 0049 30 901820", "#, #"),
                ("030/1234567, (030) 1234567, 01 23 45 67 89", "#, #, #"),
                ("(415) 555-2671 or 415-555-2671, 1-415-555-2671", "# or #, #"),
                ("01.02.2024, 2024-01-15 10:30", "01.02.2024, 2024-01-15 10:30"),
                ("1700000000, 12345678, +1234567, 1 1 1 1 1 1 1 1", "1700000000, 12345678, +1234567, 1 1 1 1 1 1 1 1"),
                ("000 1234567, +0123, (030 1234567", "000 1234567, +0123, (#"),
            ],
        );
    }
}
