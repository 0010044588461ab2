//! Byte arrays written as hexadecimal digits.

use core::fmt;

/// Bytes, displayed as lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Hex<const N: usize>(pub [u8; N]);

impl<const N: usize> fmt::Display for Hex<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl<const N: usize> fmt::Debug for Hex<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<const N: usize> Hex<N> {
    /// Parses exactly `2 N` hexadecimal digits of either case.
    pub fn parse(text: &str) -> Option<Self> {
        let digit = |c: u8| char::from(c).to_digit(16).map(|d| d as u8);
        let mut bytes = [0; N];
        if text.len() != 2 * N {
            return None;
        }
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Some(Hex(bytes))
    }
}

#[cfg(feature = "serde")]
impl<const N: usize> serde::Serialize for Hex<N> {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

#[cfg(feature = "serde")]
impl<'de, const N: usize> serde::Deserialize<'de> for Hex<N> {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Digits<const N: usize>;
        impl<const N: usize> serde::de::Visitor<'_> for Digits<N> {
            type Value = Hex<N>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} hexadecimal digits", 2 * N)
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Hex<N>, E> {
                Hex::parse(text).ok_or_else(|| E::invalid_value(serde::de::Unexpected::Str(text), &self))
            }
        }
        d.deserialize_str(Digits)
    }
}
