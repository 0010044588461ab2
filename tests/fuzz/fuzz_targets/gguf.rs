//! Any bytes: the directory is refused or can be walked, whole and from every kind of prefix.
//!
//! From `tests/`: `cargo +nightly fuzz run gguf fuzz/corpus/gguf ../fixtures/reference -- -max_len=65536`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starling::gguf::{Gguf, GgufSet, HeaderError};
use starling::quant::validate;

fuzz_target!(|bytes: &[u8]| {
    prefix(bytes);
    let Ok(gguf) = Gguf::parse(bytes) else { return };
    assert!(gguf.header_len() <= bytes.len() as u64);
    for (key, value) in gguf.metadata() {
        assert_eq!(format!("{:?}", gguf.get(key)), format!("{:?}", Some(value)));
        let _ = (gguf.u64(key), gguf.u32(key), gguf.f32(key), gguf.bool(key), gguf.str(key), gguf.bytes(key));
        let _ = (gguf.f32_array(key), gguf.u32_array(key), gguf.i32_array(key));
        if let Ok(Some(strings)) = gguf.str_array(key) {
            assert_eq!(strings.len(), strings.count());
        }
    }
    for tensor in gguf.tensors() {
        assert_eq!(gguf.tensor(tensor.name), Some(tensor));
        let data = gguf.data(tensor).expect("the whole file was given");
        assert_eq!(data.len() as u64, tensor.len_bytes);
        let _ = validate(tensor.dtype, data);
    }
    let _ = GgufSet::new(vec![gguf]);
});

/// Half of the bytes: either the whole directory is there, or more is asked for, or the file is at fault.
fn prefix(bytes: &[u8]) {
    let half = &bytes[..bytes.len() / 2];
    match Gguf::parse_header(half, bytes.len() as u64) {
        Ok(header) => assert!(header.tensors().iter().all(|t| header.data(t).is_none()) || bytes.is_empty()),
        Err(HeaderError::NeedMore { at_least }) => {
            assert!(at_least > half.len() as u64 && at_least <= bytes.len() as u64);
        }
        Err(HeaderError::Load(_)) => {}
    }
}
