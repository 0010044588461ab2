//! Conversion of settings from and to text.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

pub use starling_host::bytes::Bytes;
use starling_host::pool::CpuSet;

/// Seconds for `Retry-After`: rounded up, at least 1.
pub fn seconds(wait: Duration) -> u64 {
    wait.as_secs_f64().ceil().max(1.0) as u64
}

/// Type of a setting.
pub trait Value: Sized {
    /// # Errors
    /// What was found and what was expected.
    fn read(text: &str) -> Result<Self, String>;

    /// The value in TOML; `None` if it is unset.
    fn show(&self) -> Option<String>;

    /// The number to compare with a range; `None` for other types.
    fn number(&self) -> Option<f64> {
        None
    }

    /// # Errors
    /// The number and the range, if it is outside.
    fn within(&self, range: RangeInclusive<f64>) -> Result<(), String> {
        match self.number() {
            Some(x) if !range.contains(&x) => {
                Err(format!("found {x}, expected a number from {} to {}", range.start(), range.end()))
            }
            _ => Ok(()),
        }
    }
}

macro_rules! integers {
    ($($kind:ty),*) => {$(
        impl Value for $kind {
            fn read(text: &str) -> Result<Self, String> {
                let expected = || format!("found {text:?}, expected an integer from 0 to {}", <$kind>::MAX);
                text.trim().parse().map_err(|_| expected())
            }

            fn show(&self) -> Option<String> {
                Some(self.to_string())
            }

            fn number(&self) -> Option<f64> {
                Some(*self as f64)
            }
        }
    )*};
}

integers!(u16, u32, u64, usize);

impl Value for f32 {
    fn read(text: &str) -> Result<Self, String> {
        let value = text.trim().parse().ok().filter(|value: &f32| value.is_finite());
        value.ok_or_else(|| format!("found {text:?}, expected a number"))
    }

    fn show(&self) -> Option<String> {
        // with a decimal point, as TOML has floats
        Some(format!("{self:?}"))
    }

    fn number(&self) -> Option<f64> {
        Some((*self).into())
    }
}

impl Value for bool {
    fn read(text: &str) -> Result<Self, String> {
        match text.trim() {
            "true" | "1" | "yes" | "on" => Ok(true),
            "false" | "0" | "no" | "off" => Ok(false),
            _ => Err(format!("found {text:?}, expected true or false")),
        }
    }

    fn show(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl Value for String {
    fn read(text: &str) -> Result<Self, String> {
        Ok(text.into())
    }

    fn show(&self) -> Option<String> {
        Some(toml::Value::from(self.as_str()).to_string())
    }
}

impl Value for PathBuf {
    fn read(text: &str) -> Result<Self, String> {
        Ok(text.into())
    }

    fn show(&self) -> Option<String> {
        self.display().to_string().show()
    }
}

impl<V: Value> Value for Option<V> {
    fn read(text: &str) -> Result<Self, String> {
        V::read(text).map(Some)
    }

    fn show(&self) -> Option<String> {
        self.as_ref()?.show()
    }

    fn number(&self) -> Option<f64> {
        self.as_ref()?.number()
    }
}

impl Value for Vec<String> {
    fn read(text: &str) -> Result<Self, String> {
        Ok(text.split(',').map(str::trim).filter(|s| !s.is_empty()).map(Into::into).collect())
    }

    fn show(&self) -> Option<String> {
        Some(toml::Value::from(self.clone()).to_string())
    }
}

/// CPUs of a model's workers, each in turn; empty: any.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Affinity(pub Vec<CpuSet>);

impl Value for Affinity {
    fn read(text: &str) -> Result<Self, String> {
        let set = |list: &str| {
            let expected =
                || format!("found {list:?}, expected CPUs such as 0-3,8; those of further workers after `/`");
            CpuSet::parse(list).ok_or_else(expected)
        };
        let lists = text.split('/').map(str::trim).filter(|_| !text.trim().is_empty());
        Ok(Affinity(lists.map(set).collect::<Result<_, _>>()?))
    }

    fn show(&self) -> Option<String> {
        let lists: Vec<String> = self.0.iter().map(CpuSet::to_string).collect();
        (!lists.is_empty()).then(|| lists.join("/")).and_then(|text| text.show())
    }
}

impl Value for Duration {
    fn read(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let seconds = text.parse().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
        let expected =
            || format!("found {text:?}, expected seconds, such as 30 or 0.5, or a time with units, such as 2m 30s");
        seconds.or_else(|| humantime::parse_duration(text).ok()).ok_or_else(expected)
    }

    fn show(&self) -> Option<String> {
        Some(self.as_secs_f64().to_string())
    }

    fn number(&self) -> Option<f64> {
        Some(self.as_secs_f64())
    }
}

impl Value for Bytes {
    fn read(text: &str) -> Result<Self, String> {
        Bytes::parse(text)
    }

    fn show(&self) -> Option<String> {
        Some(self.0.to_string())
    }

    fn number(&self) -> Option<f64> {
        Some(self.0 as f64)
    }
}

macro_rules! choices {
    ($(#[doc = $doc:literal] $kind:ident { $($(#[doc = $of:literal])+ $variant:ident $name:literal),+ })*) => {$(
        #[doc = $doc]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $kind { $($(#[doc = $of])+ $variant),+ }

        impl $kind {
            pub const fn name(self) -> &'static str {
                match self { $($kind::$variant => $name),+ }
            }
        }

        impl Value for $kind {
            fn read(text: &str) -> Result<Self, String> {
                match text { $($name => Ok($kind::$variant),)+ _ => {
                    Err(format!("found {text:?}, expected {}", [$($name),+].join(" or ")))
                } }
            }

            fn show(&self) -> Option<String> {
                self.name().to_string().show()
            }
        }
    )*};
}

choices! {
    /// Additional metric names.
    Compat {
        /// Starling's names only.
        None "none",
        /// vLLM's names too, which inference gateways read.
        Vllm "vllm"
    }
    /// When a model is loaded.
    LoadPolicy {
        /// Before the server accepts requests.
        Startup "startup",
        /// When a request names it.
        OnDemand "on-demand"
    }
    /// How the worker for a request is chosen, among those with room.
    Strategy {
        /// Each in turn.
        RoundRobin "round-robin",
        /// The fewest running requests.
        LeastLoaded "least-loaded",
        /// The most free KV pages.
        MemoryAware "memory-aware",
        /// The longest cached prefix, then the fewest running requests.
        PrefixAware "prefix-aware"
    }
    /// Log format.
    LogFormat {
        /// Text, in colour on a terminal.
        Pretty "pretty",
        /// One JSON object per line.
        Json "json"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_units() {
        let cases =
            [("17", 17), ("2KiB", 2048), ("3 GiB", 3 << 30), ("1M", 1 << 20), ("1MB", 1_000_000), ("1.5GiB", 3 << 29)];
        for (text, n) in cases {
            assert_eq!(Bytes::read(text), Ok(Bytes(n)), "{text}");
        }
        for text in ["", "GiB", "-1", "99999999999TiB", "nan", "1 metre"] {
            assert!(Bytes::read(text).is_err(), "{text}: {:?}", Bytes::read(text));
        }
    }

    #[test]
    fn durations_are_seconds_or_have_units() {
        let cases = [("0.25", 250), ("30", 30_000), ("250ms", 250), ("2m 30s", 150_000), ("1h", 3_600_000)];
        for (text, ms) in cases {
            assert_eq!(Duration::read(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        assert!(["-1", "nan", "1e300", "x", "", "5 apples"].iter().all(|text| Duration::read(text).is_err()));
    }
}
