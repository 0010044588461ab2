//! Real files, hostile files, and files of our own.

use super::*;

/// Every reference file parses, from any prefix long enough, and shows its directory.
#[test]
fn reference_files() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/reference");
    for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
        if entry.path().extension().is_none_or(|e| e != "gguf") {
            continue;
        }
        let bytes = std::fs::read(entry.path()).unwrap();
        let gguf = Gguf::parse(&bytes).unwrap();
        assert!(gguf.str("general.architecture").unwrap().is_some());
        let n_vocab = gguf.str_array("tokenizer.ggml.tokens").unwrap().unwrap();
        assert_eq!(n_vocab.len(), n_vocab.clone().count());
        assert_eq!(n_vocab.len(), gguf.u32_array("tokenizer.ggml.token_type").unwrap().unwrap().len());
        for t in gguf.tensors() {
            assert_eq!(gguf.tensor(t.name), Some(t));
            assert_eq!(gguf.data(t).unwrap().len() as u64, t.len_bytes);
        }
        let mut have = 0;
        let header = loop {
            match Gguf::parse_header(&bytes[..have], bytes.len() as u64) {
                Ok(header) => break header,
                Err(HeaderError::NeedMore { at_least }) if at_least as usize > have => have = at_least as usize,
                Err(other) => panic!("{other}"),
            }
            have = (have + 4000).min(bytes.len());
        };
        assert_eq!(header.tensors(), gguf.tensors());
        assert_eq!(header.metadata(), gguf.metadata());
        assert!(header.data(&header.tensors()[0]).is_none() || have == bytes.len());
    }
}
