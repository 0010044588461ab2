//! Integers that clients write as floats. Programs whose language has one type of numbers send `5.0`; where a field is an
//! integer, it is read as 5. All other values are passed on as they are.

use std::fmt;

use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, EnumAccess, Error, MapAccess, SeqAccess, Unexpected, Visitor,
};

/// Magnitude up to which each integer is a float.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

/// A deserializer, seed, visitor or access whose integers may be written as floats.
pub(crate) struct Whole<T>(pub(crate) T);

/// The visitor of a type; `is_integer` if that is an integer.
struct WholeVisitor<V> {
    inner: V,
    is_integer: bool,
}

macro_rules! forward {
    ($($method:ident($($arg:ident: $of:ty),*) $is_integer:literal;)*) => {
        $(fn $method<V: Visitor<'de>>(self, $($arg: $of,)* visitor: V) -> Result<V::Value, Self::Error> {
            self.0.$method($($arg,)* WholeVisitor { inner: visitor, is_integer: $is_integer })
        })*
    };
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Whole<D> {
    type Error = D::Error;

    forward! {
        deserialize_any() false;
        deserialize_bool() false;
        deserialize_i8() true;
        deserialize_i16() true;
        deserialize_i32() true;
        deserialize_i64() true;
        deserialize_u8() true;
        deserialize_u16() true;
        deserialize_u32() true;
        deserialize_u64() true;
        deserialize_f32() false;
        deserialize_f64() false;
        deserialize_char() false;
        deserialize_str() false;
        deserialize_string() false;
        deserialize_bytes() false;
        deserialize_byte_buf() false;
        deserialize_option() false;
        deserialize_unit() false;
        deserialize_unit_struct(name: &'static str) false;
        deserialize_newtype_struct(name: &'static str) false;
        deserialize_seq() false;
        deserialize_tuple(len: usize) false;
        deserialize_tuple_struct(name: &'static str, len: usize) false;
        deserialize_map() false;
        deserialize_struct(name: &'static str, fields: &'static [&'static str]) false;
        deserialize_enum(name: &'static str, variants: &'static [&'static str]) false;
        deserialize_identifier() false;
        deserialize_ignored_any() false;
    }

    fn is_human_readable(&self) -> bool {
        self.0.is_human_readable()
    }
}

macro_rules! visit {
    ($($method:ident($of:ty))*) => {
        $(fn $method<E: Error>(self, value: $of) -> Result<V::Value, E> {
            self.inner.$method(value)
        })*
    };
}

impl<'de, V: Visitor<'de>> Visitor<'de> for WholeVisitor<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    visit! {
        visit_bool(bool) visit_i64(i64) visit_u64(u64) visit_char(char) visit_str(&str) visit_borrowed_str(&'de str)
        visit_string(String) visit_bytes(&[u8]) visit_borrowed_bytes(&'de [u8]) visit_byte_buf(Vec<u8>)
    }

    fn visit_f64<E: Error>(self, x: f64) -> Result<V::Value, E> {
        if self.is_integer {
            match integer(x) {
                Some(n) if n >= 0 => return self.inner.visit_u64(n.cast_unsigned()),
                Some(n) => return self.inner.visit_i64(n),
                None => {}
            }
        }
        self.inner.visit_f64(x)
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        self.inner.visit_some(Whole(deserializer))
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        self.inner.visit_newtype_struct(Whole(deserializer))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<V::Value, A::Error> {
        self.inner.visit_seq(Whole(seq))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(Whole(map))
    }

    // no request has an enum with integers in its variants
    fn visit_enum<A: EnumAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        self.inner.visit_enum(access)
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Whole<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Value, D::Error> {
        self.0.deserialize(Whole(deserializer))
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Whole<A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.0.next_element_seed(Whole(seed))
    }

    fn size_hint(&self) -> Option<usize> {
        self.0.size_hint()
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Whole<A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.0.next_key_seed(seed)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        self.0.next_value_seed(Whole(seed))
    }

    fn size_hint(&self) -> Option<usize> {
        self.0.size_hint()
    }
}

/// The integer that a float is, if it is one and no other has the same float.
pub(crate) fn integer(x: f64) -> Option<i64> {
    (x.fract() == 0.0 && x.abs() < MAX_EXACT).then_some(x as i64)
}

/// A number, of which clients write -1 for "no limit".
struct Limit(Option<u64>);

impl<'de> Deserialize<'de> for Limit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct LimitVisitor;
        impl Visitor<'_> for LimitVisitor {
            type Value = Limit;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number, or -1 for no limit")
            }
            fn visit_u64<E: Error>(self, n: u64) -> Result<Limit, E> {
                Ok(Limit(Some(n)))
            }
            fn visit_i64<E: Error>(self, n: i64) -> Result<Limit, E> {
                if n == -1 { Ok(Limit(None)) } else { Err(E::invalid_value(Unexpected::Signed(n), &self)) }
            }
        }
        deserializer.deserialize_u64(LimitVisitor)
    }
}

/// Reads an optional number of tokens; -1 is none, as in llama.cpp, LM Studio and Ollama.
pub(crate) fn limit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Ok(Option::<Limit>::deserialize(deserializer)?.and_then(|limit| limit.0))
}

/// As [`limit`], of a number that is kept in memory.
pub(crate) fn size_limit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    Ok(limit(deserializer)?.map(|n| usize::try_from(n).unwrap_or(usize::MAX)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use starling::chat::Json;

    use super::*;
    use crate::parse::parse;

    #[derive(Debug, Default, PartialEq, serde::Deserialize)]
    #[serde(default)]
    struct Inner {
        list: Vec<u32>,
        name: Option<String>,
    }

    #[derive(Debug, Default, PartialEq, serde::Deserialize)]
    #[serde(default)]
    struct All {
        n: u8,
        signed: Option<i64>,
        real: f32,
        inner: Inner,
        value: Value,
        json: Option<Json>,
        #[serde(deserialize_with = "limit")]
        most: Option<u64>,
        #[serde(deserialize_with = "size_limit")]
        budget: Option<usize>,
    }

    #[test]
    fn integers_may_be_written_as_floats() {
        let read = |json: Value| parse::<All>(json.to_string().as_bytes());
        let all = read(json!({
            "n": 5.0, "signed": -3.0, "real": 2, "inner": { "list": [1.0, 2], "name": "x" }, "most": 7.0, "budget": 8.0,
            "value": { "multipleOf": 1.0 }, "json": { "x": 5.0 },
        }));
        let all = all.expect("a value");
        assert_eq!((all.n, all.signed, all.real, all.most, all.budget), (5, Some(-3), 2.0, Some(7), Some(8)));
        assert_eq!(all.inner, Inner { list: vec![1, 2], name: Some("x".into()) });
        // what is passed on keeps its form
        assert_eq!(all.value.to_string(), r#"{"multipleOf":1.0}"#);
        assert_eq!(all.json, serde_json::from_str(r#"{"x":5.0}"#).ok());
        assert_ne!(all.json, serde_json::from_str(r#"{"x":5}"#).ok());
        let limits = read(json!({ "most": -1, "budget": -1.0 })).expect("a value");
        assert_eq!((limits.most, limits.budget), (None, None));
        let error = |json: Value| {
            let error = read(json).expect_err("an error");
            (error.param.unwrap_or_default(), error.message)
        };
        for (json, path, found) in [
            (json!({ "n": 5.5 }), "n", "floating point `5.5`, expected u8"),
            (json!({ "n": 256.0 }), "n", "integer `256`, expected u8"),
            (json!({ "signed": 1e300 }), "signed", "floating point `1e+300`, expected i64"),
            (json!({ "inner": { "list": [1, -1.0] } }), "inner.list[1]", "integer `-1`, expected u32"),
            (json!({ "most": -2 }), "most", "integer `-2`, expected a whole number, or -1 for no limit"),
        ] {
            let (param, message) = error(json);
            assert!(param == path && message.contains(found), "{param}: {message}");
        }
    }
}
