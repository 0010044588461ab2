//! Reference files, hostile files, and files written by this module.

use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::*;

/// Builds a file field by field, little-endian.
#[derive(Clone, Default)]
struct Raw(Vec<u8>);

impl Raw {
    fn new(version: u32, n_tensors: u64, n_metadata: u64) -> Raw {
        Raw(MAGIC.to_vec()).u32(version).u64(n_tensors).u64(n_metadata)
    }
    fn u32(mut self, v: u32) -> Raw {
        self.0.extend(v.to_le_bytes());
        self
    }
    fn u64(mut self, v: u64) -> Raw {
        self.0.extend(v.to_le_bytes());
        self
    }
    fn str(self, v: &str) -> Raw {
        self.bytes(v.as_bytes())
    }
    fn bytes(self, v: &[u8]) -> Raw {
        let mut raw = self.u64(v.len() as u64);
        raw.0.extend(v);
        raw
    }
    fn tensor(self, name: &str, dims: &[u64], dtype: u32, offset: u64) -> Raw {
        let raw = self.str(name).u32(dims.len() as u32);
        dims.iter().fold(raw, |raw, &d| raw.u64(d)).u32(dtype).u64(offset)
    }
    /// Padding to 32 bytes and this much data.
    fn data(mut self, len: usize) -> Vec<u8> {
        self.0.resize(self.0.len().next_multiple_of(32) + len, 0);
        self.0
    }
}

fn bad(at: u64, what: &'static str, found: &str, expected: &str) -> LoadError {
    LoadError::Gguf { at, what, found: found.into(), expected: expected.into() }
}

fn tensor(name: &str, found: &str, expected: &str) -> LoadError {
    LoadError::Tensor { name: name.into(), found: found.into(), expected: expected.into() }
}

fn metadata(key: &str, found: &str, expected: &str) -> LoadError {
    LoadError::Metadata { key: key.into(), found: found.into(), expected: expected.into() }
}

#[track_caller]
fn refuses(file: &[u8], expected: LoadError) {
    assert_eq!(Gguf::parse(file).map(|_| ()), Err(expected));
}

#[test]
fn hostile_preambles() {
    refuses(b"", bad(0, "magic", "0 bytes to the end of the file", "4 bytes"));
    refuses(b"GGML\0\0\0\0", bad(0, "magic", "[47, 47, 4d, 4c]", "`GGUF`"));
    let v1 = "2 or 3 (version 1 is long obsolete: convert the model again)";
    refuses(&Raw::new(1, 0, 0).0, bad(4, "version", "1", v1));
    let swapped = Raw::new(3u32.swap_bytes(), 0, 0).0;
    refuses(&swapped, bad(4, "version", "version 3 in big-endian order", "a little-endian file"));
    refuses(&Raw::new(4, 0, 0).0, bad(4, "version", "4", "2 or 3"));
    refuses(&Raw::new(3, u64::MAX, 0).0, bad(8, "tensor count", "18446744073709551615", "at most 0"));
    refuses(&Raw::new(3, 0, 1 << 40).u64(0).u64(0).0, bad(16, "metadata count", "1099511627776", "at most 1"));
    refuses(&Raw::new(3, 0, 0).0[..20], bad(16, "metadata count", "4 bytes to the end of the file", "8 bytes"));
    assert_eq!(Gguf::parse(&Raw::new(2, 0, 0).0).unwrap().header_len(), 24);
}

#[test]
fn hostile_metadata() {
    let one = |raw: fn(Raw) -> Raw| raw(Raw::new(3, 0, 1)).data(0);
    refuses(&one(|r| r.u64(1 << 63).u64(0)), bad(24, "metadata key", "9223372036854775808 bytes", "at most 65535"));
    refuses(&one(|r| r.u64(60_000).u64(0)), bad(32, "metadata key", "32 bytes to the end of the file", "60000 bytes"));
    refuses(&one(|r| r.str("").u32(4).u32(1)), bad(24, "metadata key", "an empty string", "a name"));
    refuses(&one(|r| r.bytes(b"a\xff").u32(4).u32(1)), bad(24, "metadata key", "a bad byte at 1 of 2", "UTF-8"));
    refuses(&one(|r| r.str("k").u32(13).u32(1)), bad(33, "value type", "13", "0 to 12"));
    refuses(&one(|r| r.str("k").u32(7).u32(2)), bad(37, "bool", "[2]", "0 or 1"));
    let beyond = bad(45, "string", "19 bytes to the end of the file", "99 bytes");
    refuses(&one(|r| r.str("k").u32(8).u64(99)), beyond);
    let huge = bad(41, "array length", "9223372036854775807", "at most 1");
    refuses(&one(|r| r.str("k").u32(9).u32(11).u64(i64::MAX as u64)), huge);
    let bools = bad(50, "bool", "[2]", "0 or 1");
    refuses(&one(|r| r.str("k").u32(9).u32(7).u64(4).u32(0x0002_0100 >> 8 | 1)), bools);
    let string = bad(57, "string in an array", "7 bytes to the end of the file", "77 bytes");
    refuses(&one(|r| r.str("k").u32(9).u32(8).u64(1).u64(77)), string);

    let nested = |depth: usize| {
        let raw = (1..depth).fold(Raw::new(3, 0, 1).str("k").u32(9), |raw, _| raw.u32(9).u64(1));
        raw.u32(0).u64(0).data(0)
    };
    assert!(Gguf::parse(&nested(2)).is_ok());
    refuses(&nested(5), bad(61, "array", "nesting of 3", "at most 2"));
    refuses(&nested(10_000), bad(61, "array", "nesting of 3", "at most 2"));

    let twice = Raw::new(3, 0, 3).str("k").u32(4).u32(1).str("a").u32(4).u32(1).str("k").u32(5).u32(2);
    refuses(&twice.0, metadata("k", "two entries", "one"));
}

#[test]
fn hostile_alignment() {
    let expected = "a U32, a power of two from 8 to 2097152";
    for (alignment, ok) in [(0, false), (4, false), (8, true), (48, false), (64, true), (1 << 22, false)] {
        let file = Raw::new(3, 0, 1).str("general.alignment").u32(4).u32(alignment).0;
        match Gguf::parse(&file) {
            Ok(gguf) => assert!(ok && gguf.alignment() == u64::from(alignment)),
            Err(e) => {
                assert!(!ok);
                assert_eq!(e, metadata("general.alignment", &format!("U32({alignment})"), expected));
            }
        }
    }
    let wide = Raw::new(3, 0, 1).str("general.alignment").u32(10).u64(32).0;
    refuses(&wide, metadata("general.alignment", "U64(32)", expected));
}

#[test]
fn hostile_tensors() {
    let one = |dims: &[u64], dtype, offset| Raw::new(3, 1, 0).tensor("t", dims, dtype, offset).data(32);
    assert!(Gguf::parse(&one(&[8], 0, 0)).is_ok());
    refuses(&one(&[], 0, 0), tensor("t", "0 dimensions", "1 to 4"));
    refuses(&one(&[1; 5], 0, 0), tensor("t", "5 dimensions", "1 to 4"));
    refuses(&one(&[1], 99, 0), tensor("t", "type 99", "the id of a ggml type"));
    refuses(&one(&[32], 4, 0), tensor("t", "type 4 (Q4_2, removed from ggml)", "the id of a ggml type"));
    refuses(&one(&[8], 0, 16), tensor("t", "offset 16", "a multiple of 32"));
    let shape = |n| format!("non-zero sizes, rows of whole blocks of {n}, and a total below 2^63");
    refuses(&one(&[0], 0, 0), tensor("t", "F32 [0, 1, 1, 1]", &shape(1)));
    refuses(&one(&[8, 0, 8], 0, 0), tensor("t", "F32 [8, 0, 8, 1]", &shape(1)));
    refuses(&one(&[33], 2, 0), tensor("t", "Q4_0 [33, 1, 1, 1]", &shape(32)));
    let square = 1 << 32;
    refuses(&one(&[square, square], 0, 0), tensor("t", "F32 [4294967296, 4294967296, 1, 1]", &shape(1)));
    refuses(&one(&[1 << 62], 0, 0), tensor("t", "F32 [4611686018427387904, 1, 1, 1]", &shape(1)));
    let whole = "data within the 32 bytes that the file has after its header";
    let data = |bytes, at| format!("{bytes} bytes of data at {at} after the header");
    refuses(&one(&[9], 0, 0), tensor("t", &data(36, 0), whole));
    refuses(&one(&[8], 0, 32), tensor("t", &data(32, 32), whole));
    refuses(&one(&[8], 0, u64::MAX - 31), tensor("t", &data(32, u64::MAX - 31), whole));

    let two = |a, b, at| Raw::new(3, 2, 0).tensor(a, &[16], 0, 0).tensor(b, &[8], 0, at).data(96);
    let gguf = two("a", "b", 64);
    assert_eq!(Gguf::parse(&gguf).unwrap().tensors()[1].offset, 96 + 64);
    refuses(&two("a", "a", 64), tensor("a", "two tensors of this name", "one"));
    refuses(&two("a", "b", 32), tensor("b", "offset 128", "at least 160, the end of `a`"));
    let long = "n".repeat(257);
    refuses(&two(&long, "b", 64), bad(24, "tensor name", "257 bytes", "at most 256"));
}

#[test]
fn no_data_needs_no_padding() {
    let file = Raw::new(3, 0, 1).str("k").u32(0).0;
    let file = [&file[..], &[5]].concat();
    let gguf = Gguf::parse(&file).unwrap();
    assert_eq!(gguf.header_len(), file.len() as u64);
    assert_eq!(gguf.get("k"), Some(&Value::U8(5)));
}

/// A file with a value of every type.
fn sample() -> Vec<u8> {
    let mut w = GgufWriter::with_alignment(64).unwrap();
    for (key, value) in scalars() {
        w.metadata(key, &value).unwrap();
    }
    w.str("str", "text").unwrap();
    w.metadata("bytes", &Value::Str(&[0xff, 0])).unwrap();
    w.str_array("strings", &["a", "", "bc"]).unwrap();
    w.i32_array("i32s", &[-1, 2]).unwrap();
    w.u32_array("u32s", &[1, u32::MAX]).unwrap();
    w.f32_array("f32s", &[0.5, -2.0]).unwrap();
    w.str_array::<&str>("none", &[]).unwrap();
    assert_eq!(w.tensor("matrix", Dtype::Q4_0, &[32, 3]), Ok(54));
    assert_eq!(w.tensor("vector", Dtype::F32, &[5]), Ok(20));
    assert_eq!((w.padding(54), w.padding(20), w.padding(64)), (10, 44, 0));
    let file = w.file([vec![1; 54], vec![2; 20]]);
    assert_eq!(file.len() as u64, w.header().len() as u64 + w.data_len());
    file
}

fn scalars() -> [(&'static str, Value<'static>); 11] {
    [
        ("u8", Value::U8(200)),
        ("i8", Value::I8(-7)),
        ("u16", Value::U16(60_000)),
        ("i16", Value::I16(-7)),
        ("u32", Value::U32(4_000_000_000)),
        ("i32", Value::I32(-7)),
        ("f32", Value::F32(0.25)),
        ("bool", Value::Bool(true)),
        ("u64", Value::U64(u64::MAX)),
        ("i64", Value::I64(-7)),
        ("f64", Value::F64(0.1)),
    ]
}

#[test]
fn round_trip() {
    let file = sample();
    let gguf = Gguf::parse(&file).unwrap();
    assert_eq!((gguf.version(), gguf.alignment(), gguf.header_len() % 64), (3, 64, 0));
    assert_eq!(gguf.metadata().len(), 1 + 11 + 7);
    for (key, value) in scalars() {
        assert_eq!(gguf.get(key), Some(&value));
    }
    assert_eq!(gguf.str_array("strings").unwrap().unwrap().collect::<Vec<_>>(), [&b"a"[..], b"", b"bc"]);
    assert_eq!(gguf.str_array("none").unwrap().unwrap().len(), 0);
    let matrix = gguf.tensor("matrix").unwrap();
    assert_eq!((matrix.dims, matrix.n_dims, matrix.n_elements(), matrix.n_rows()), ([32, 3, 1, 1], 2, 96, 3));
    assert_eq!(gguf.data(matrix).unwrap(), [1; 54]);
    assert_eq!(gguf.data(gguf.tensor("vector").unwrap()).unwrap(), [2; 20]);
    assert_eq!(gguf.tensor("none"), None);

    // copying everything gives the same file
    let mut copy = GgufWriter::with_alignment(64).unwrap();
    for (key, value) in &gguf.metadata()[1..] {
        copy.metadata(key, value).unwrap();
    }
    for t in gguf.tensors() {
        copy.tensor(t.name, t.dtype, &t.dims[..t.n_dims as usize]).unwrap();
    }
    assert_eq!(copy.header(), file[..gguf.header_len() as usize]);
}

#[test]
fn getters_convert_and_check() {
    let file = sample();
    let gguf = Gguf::parse(&file).unwrap();
    assert_eq!(gguf.u64("missing"), Ok(None));
    assert_eq!(gguf.u64("u8"), Ok(Some(200)));
    assert_eq!(gguf.u32("u32"), Ok(Some(4_000_000_000)));
    assert_eq!(gguf.f32("f64"), Ok(Some(0.1)));
    assert_eq!(gguf.bool("bool"), Ok(Some(true)));
    assert_eq!(gguf.str("str"), Ok(Some("text")));
    assert_eq!(gguf.bytes("bytes"), Ok(Some(&[0xff, 0][..])));
    assert_eq!(gguf.i32_array("i32s"), Ok(Some(vec![-1, 2])));
    assert_eq!(gguf.u32_array("u32s"), Ok(Some(vec![1, u32::MAX])));
    assert_eq!(gguf.f32_array("f32s"), Ok(Some(vec![0.5, -2.0])));

    assert_eq!(gguf.u64("i8"), Err(metadata("i8", "I8(-7)", "a non-negative integer")));
    assert_eq!(gguf.u32("u64"), Err(metadata("u64", "U64(18446744073709551615)", "a non-negative integer below 2^32")));
    assert_eq!(gguf.f32("u8"), Err(metadata("u8", "U8(200)", "a float")));
    assert_eq!(gguf.bool("str"), Err(metadata("str", "a string of 4 bytes", "a bool")));
    assert_eq!(gguf.str("bytes"), Err(metadata("bytes", "a string of 2 bytes", "a UTF-8 string")));
    let array = "an array of 2 I32";
    assert_eq!(gguf.bytes("i32s"), Err(metadata("i32s", array, "a string")));
    assert_eq!(gguf.u32_array("i32s"), Err(metadata("i32s", array, "an array of integers from 0 to 2^32 - 1")));
    assert_eq!(gguf.f32_array("i32s"), Err(metadata("i32s", array, "an array of floats")));
    assert_eq!(gguf.str_array("i32s").map(|_| ()), Err(metadata("i32s", array, "an array of strings")));
    assert_eq!(gguf.f32_array("strings"), Err(metadata("strings", "an array of 3 Str", "an array of floats")));
}

#[test]
fn writer_refuses() {
    let mut w = GgufWriter::new();
    w.str("k", "v").unwrap();
    w.tensor("k", Dtype::F32, &[1]).unwrap(); // tensors and metadata do not share names
    assert_eq!(w.str("k", "v"), Err(WriteError::Duplicate("k".into())));
    assert_eq!(w.tensor("k", Dtype::F32, &[1]), Err(WriteError::Duplicate("k".into())));
    assert_eq!(w.str("", "v"), Err(WriteError::Name { name: String::new(), max: 65_535 }));
    let shape = WriteError::Shape { name: "t".into(), dtype: Dtype::Q8_0, dims: vec![31] };
    assert_eq!(w.tensor("t", Dtype::Q8_0, &[31]), Err(shape));
    assert_eq!(w.metadata("general.alignment", &Value::U32(8)), Err(WriteError::Alignment(32)));
    assert_eq!(GgufWriter::with_alignment(24).map(|_| ()), Err(WriteError::Alignment(24)));
}

/// Calls every function of the reader; none may panic.
fn walk(file: &[u8]) {
    let Ok(gguf) = Gguf::parse(file) else { return };
    for (key, value) in gguf.metadata() {
        assert_eq!(format!("{:?}", gguf.get(key)), format!("{:?}", Some(value)));
        let _ = (gguf.u64(key), gguf.u32(key), gguf.f32(key), gguf.bool(key), gguf.str(key), gguf.bytes(key));
        let _ = (gguf.f32_array(key), gguf.u32_array(key), gguf.i32_array(key));
        if let Ok(Some(strings)) = gguf.str_array(key) {
            assert_eq!(strings.len(), strings.count());
        }
    }
    for t in gguf.tensors() {
        assert_eq!(gguf.tensor(t.name), Some(t));
        assert_eq!(gguf.data(t).unwrap().len() as u64, t.len_bytes);
    }
}

proptest! {
    #[test]
    fn random_bytes_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..400), n in 0u8..4, v in 2u8..4) {
        walk(&bytes);
        let header = [&MAGIC[..], &[v, 0, 0, 0, n, 0, 0, 0, 0, 0, 0, 0, n, 0, 0, 0, 0, 0, 0, 0]].concat();
        bytes.splice(..0, header);
        walk(&bytes);
    }

    #[test]
    fn mutated_files_never_panic(
        flips in proptest::collection::vec((any::<prop::sample::Index>(), 0u8..8), 1..4),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let mut file = sample();
        for (at, bit) in flips {
            let at = at.index(file.len());
            file[at] ^= 1 << bit;
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len()));
        }
        walk(&file);
    }

    #[test]
    fn cut_files_are_refused_and_prefixes_ask_for_more(cut in any::<prop::sample::Index>()) {
        let file = sample();
        let cut = cut.index(file.len() - 64); // the end is padding
        prop_assert!(Gguf::parse(&file[..cut]).is_err());
        match Gguf::parse_header(&file[..cut], file.len() as u64) {
            Err(HeaderError::NeedMore { at_least }) => prop_assert!(at_least as usize > cut && at_least < file.len() as u64),
            Ok(header) => prop_assert!(cut as u64 + 64 > header.header_len()),
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}

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
