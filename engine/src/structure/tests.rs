use super::*;

/// `Some(true)` for a text of the form, `Some(false)` for the beginning of one, `None` for any other.
pub(crate) fn match_text(source: &GrammarSource, text: &str) -> Option<bool> {
    let vocabulary = ApproximateTokEnv::single_byte_env();
    let mut factory = ParserFactory::new_simple(&vocabulary).expect("a factory");
    let mut parser = factory.quiet().create_parser(source.grammar().expect("a grammar")).expect("a parser");
    parser.start_without_prompt();
    let bytes: Vec<u32> = text.bytes().map(u32::from).collect();
    let n_valid = parser.validate_tokens_raw(&bytes).expect("a count");
    if n_valid < bytes.len() {
        return None;
    }
    bytes.iter().for_each(|byte| assert_eq!(parser.consume_token(*byte).expect("a byte"), 0));
    Some(parser.is_accepting())
}

/// The vocabulary of all bytes, and a token that ends an answer.
pub(crate) fn bytes_vocabulary() -> Vec<u8> {
    let mut words = 257u32.to_le_bytes().to_vec();
    for byte in 0..=255u8 {
        words.extend(1u32.to_le_bytes());
        words.push(byte);
    }
    words.extend(4u32.to_le_bytes());
    words.extend(b"\xFFend");
    words.extend(256u32.to_le_bytes());
    words
}

#[test]
fn a_stopped_compilation_ends_at_its_next_step() {
    let stop = AtomicBool::new(false);
    // the client leaves while the vocabulary is read
    let words = || {
        stop.store(true, Ordering::Relaxed);
        bytes_vocabulary()
    };
    let structures = Structures::new(Limits::DEFAULT);
    let stopped = |source: GrammarSource| {
        matches!(structures.constraint_unless(&words, &source, &stop), Err(StructureError::Stopped))
    };
    assert!(stopped(GrammarSource::Regex("a+".into())) && stopped(GrammarSource::Schema(json!({ "type": "integer" }))));
    let calls = Calls::new(&[json!({ "function": { "name": "f", "strict": true } })], 0..1, true, true);
    let result = structures.calls_unless(&words, &calls, None, &stop);
    assert!(matches!(result, Err((CallsPart::Tools, StructureError::Stopped))));
    assert!(structures.constraint(&words, &GrammarSource::Regex("a+".into())).is_ok());
}

#[test]
fn json_whitespace_is_limited() {
    let source = GrammarSource::Schema(
        json!({ "type": "object", "properties": { "a": { "type": "array" } }, "additionalProperties": false }),
    );
    for text in ["{}", "{\"a\":[1,2]}", "{ \"a\": [1, 2] }", "{\n  \"a\": [\n    1\n  ]\n}", "{\n\n\t\"a\" : []}"] {
        assert_eq!(match_text(&source, text), Some(true), "{text}");
    }
    for text in [" {}", "{  }", "{\n\n\n}", "{\r}", "{} ", "{\"b\": 1}"] {
        assert_eq!(match_text(&source, text), None, "{text}");
    }
    let with_options =
        json!({ "x-guidance": { "whitespace_flexible": false }, "type": "array", "items": { "type": "null" } });
    assert_eq!(match_text(&GrammarSource::Schema(with_options.clone()), "[null,null]"), Some(true));
    assert_eq!(match_text(&GrammarSource::Schema(with_options), "[null, null]"), None);
    // properties keep the order of the schema
    let ordered: Value =
        serde_json::from_str(r#"{"type": "object", "properties": {"z": true, "a": true}}"#).expect("JSON");
    assert_eq!(match_text(&GrammarSource::Schema(ordered.clone()), r#"{"z": 1, "a": 2}"#), Some(true));
    assert_eq!(match_text(&GrammarSource::Schema(ordered), r#"{"a": 2, "z": 1}"#), None);
}

#[test]
fn a_key_with_escapes_does_not_bypass_its_schema() {
    let listed = json!({ "type": "object", "properties": { "a": { "type": "integer" } } });
    let closed = json!({ "type": "object", "properties": { "a": { "type": "string" } }, "required": ["a"],
        "additionalProperties": false });
    let patterns = json!({ "type": "object", "patternProperties": { "^a$": { "type": "integer" } } });
    for (schema, text, expected) in [
        (&listed, r#"{"a": 1, "b": "x"}"#, Some(true)),
        (&listed, r#"{"b": "\u0061"}"#, None),
        (&listed, r#"{"\u0061": "x"}"#, None),
        (&listed, r#"{"b\n": "\""}"#, Some(true)),
        (&patterns, r#"{"\u0061": "x"}"#, None),
        // where all keys are known, texts may have escapes for control characters
        (&closed, r#"{"a": "\u001b"}"#, Some(true)),
        (&closed, r#"{"\u0061": "x"}"#, None),
        (&json!({ "type": "object" }), r#"{"\u001b": "\u001b"}"#, Some(true)),
    ] {
        assert_eq!(match_text(&GrammarSource::Schema(schema.clone()), text), expected, "{schema} {text}");
    }
}

#[test]
fn a_truncated_vocabulary_is_refused() {
    let (mut vocabulary, tokens): (_, [&[u8]; 5]) =
        (5u32.to_le_bytes().to_vec(), [b"a", b"b", b"", b"ab", b"\xFF<end>"]);
    for token in tokens {
        vocabulary.extend((token.len() as u32).to_le_bytes());
        vocabulary.extend(token);
    }
    vocabulary.extend(4u32.to_le_bytes());
    let source = GrammarSource::Regex("a+b".into());
    for n in 0..vocabulary.len() {
        // without the last number there is no end token, which is valid
        if n == vocabulary.len() - 4 {
            continue;
        }
        let result = Structures::new(Limits::DEFAULT).constraint(&|| vocabulary[..n].to_vec(), &source);
        assert!(matches!(result, Err(StructureError::Vocabulary(_))), "{n} bytes: {result:?}");
    }
    let structures = Structures::new(Limits::DEFAULT);
    let mut constraint = structures.constraint(&|| vocabulary.clone(), &source).expect("a constraint").fork();
    let allowed = |constraint: &mut dyn Constraint| {
        let mut mask = [0];
        (constraint.allow(&mut mask).expect("a mask"), mask[0] & 0b1111)
    };
    assert_eq!(allowed(&mut *constraint), (false, 0b1001));
    assert_eq!(constraint.accept(0), Ok(false));
    assert_eq!(allowed(&mut *constraint), (false, 0b1011));
    assert_eq!(constraint.accept(3), Ok(true), "complete");
}

#[test]
fn gbnf_is_recognised() {
    for text in ["root ::= \"a\"", "# x\n  my-rule  ::= [a-z]+\nroot ::= my-rule", "root::= x"] {
        assert!(gbnf_line(text).is_some(), "{text}");
    }
    for text in ["start: \"a ::= b\"", "start: /::=/", "start: a\na: \"::=\"", "::= x"] {
        assert_eq!(gbnf_line(text), None);
    }
}
