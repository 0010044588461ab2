//! Format of a row. Integers are little-endian.
//!
//! | bytes  | field                                                        |
//! |--------|--------------------------------------------------------------|
//! | 0      | format version                                               |
//! | 1      | kind                                                         |
//! | 2..10  | time of creation, in milliseconds since 1970                 |
//! | 10..18 | expiry, likewise                                             |
//! | 18..   | tenant and ID, each with its length in 4 bytes; the value    |

use super::{Kind, RowId, RowInfo};
use crate::state::fields::{Malformed, Reader, push_text};

const VERSION: u8 = 1;

/// What the key of a row is a hash of.
pub fn name(id: &RowId) -> Vec<u8> {
    let mut name = vec![id.kind.code()];
    push_text(&mut name, &id.tenant);
    push_text(&mut name, &id.id);
    name
}

pub fn encode(id: &RowId, info: &RowInfo, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(26 + id.tenant.len() + id.id.len() + value.len());
    bytes.extend([VERSION, id.kind.code()]);
    bytes.extend(info.created.to_le_bytes());
    bytes.extend(info.expires.to_le_bytes());
    push_text(&mut bytes, &id.tenant);
    push_text(&mut bytes, &id.id);
    bytes.extend_from_slice(value);
    bytes
}

/// A row, and the offset of its value.
pub fn decode(bytes: &[u8]) -> Result<(RowId, RowInfo, usize), Malformed> {
    let mut reader = Reader(bytes);
    let [version, kind] = reader.array::<2>()?;
    let kind = Kind::of_code(kind).filter(|_| version == VERSION).ok_or(Malformed)?;
    let (created, expires) = (reader.u64()?, reader.u64()?);
    let (tenant, id) = (reader.text()?.into(), reader.text()?.into());
    let value = reader.0.len();
    Ok((RowId { kind, tenant, id }, RowInfo { created, expires, n_bytes: value }, bytes.len() - value))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rows_come_back(
            tenant in ".{0,20}", id in ".{0,300}", created in any::<u64>(), expires in any::<u64>(), value in prop::collection::vec(any::<u8>(), 0..50),
        ) {
            for kind in Kind::ALL {
                let id = RowId { kind, tenant: tenant.as_str().into(), id: id.as_str().into() };
                let info = RowInfo { created, expires, n_bytes: value.len() };
                let bytes = encode(&id, &info, &value);
                let (found, found_info, at) = decode(&bytes).unwrap();
                prop_assert_eq!((&found, found_info, &bytes[at..]), (&id, info, &value[..]));
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = decode(&bytes);
        }
    }

    #[test]
    fn names_are_different() {
        let of = |tenant: &str, id: &str| name(&RowId { kind: Kind::Session, tenant: tenant.into(), id: id.into() });
        assert_ne!(of("a", "bc"), of("ab", "c"));
    }
}
