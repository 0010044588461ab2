//! Memory of compiling constraints, counted by the allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use starling::structure::{GrammarSource, Limits, Structures};

/// Counts the bytes that are allocated.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static TOTAL: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls are passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        TOTAL.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A vocabulary of all bytes, some thousand words and an end token.
fn vocabulary() -> Vec<u8> {
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    let letters = || b'a'..=b'z';
    tokens.extend(letters().flat_map(|a| letters().flat_map(move |b| letters().map(move |c| vec![b' ', a, b, c]))));
    tokens.extend((0..2000).map(|n: u32| n.to_string().into_bytes()));
    tokens.push(b"\xFFend".to_vec());
    let mut words = (tokens.len() as u32).to_le_bytes().to_vec();
    for token in &tokens {
        words.extend((token.len() as u32).to_le_bytes());
        words.extend(token);
    }
    words.extend((tokens.len() as u32 - 1).to_le_bytes());
    words
}

fn schema(value: Value) -> GrammarSource {
    GrammarSource::Schema(value)
}

fn lark(text: String) -> GrammarSource {
    GrammarSource::Lark(text, Vec::new())
}

/// Constraints of at most 64 KiB that are expensive to compile.
fn hostile() -> Vec<(&'static str, GrammarSource)> {
    let class: String = (0..9000).filter_map(|i| char::from_u32(0x4e00 + 2 * i)).collect();
    let doubling: String = (0..10).map(|i| format!("r{i} ::= r{} r{}\n", i + 1, i + 1)).collect();
    let alternatives: Vec<String> = (0..60).map(|i| format!("r{} \"{i}\"", i % 11)).collect();
    let gbnf = format!("root ::= {}\n{doubling}r10 ::= [{class}]\n", alternatives.join(" | "));
    let small: String = class.chars().take(300).collect();
    let gbnf2 = format!("root ::= {}\n{doubling}r10 ::= [{small}]\n", alternatives.join(" | "));
    let many: Vec<String> =
        (0..900).map(|i| format!("\"p{i}\" [{}]", class.chars().skip(i * 9).take(9).collect::<String>())).collect();
    let primes = [9973, 9967, 9949, 9941].map(|p| json!({ "multipleOf": p }));
    let ranges: Vec<Value> = (0..400)
        .map(|i| json!({ "type": "integer", "minimum": i * 1000, "maximum": i * 7777 + 3, "multipleOf": 9000 + i }))
        .collect();
    let props = |n: usize, value: Value| -> Value {
        (0..n).map(|i| (format!("p{i}"), value.clone())).collect::<serde_json::Map<_, _>>().into()
    };
    let nested = (0..12).fold(
        json!({ "type": "string" }),
        |inner, i| json!({ "type": "object", "properties": { "a": inner.clone(), (format!("b{i}")): inner } }),
    );
    let defs: serde_json::Map<String, Value> = (0..40).map(|i| (format!("d{i}"), json!({ "allOf": [{ "$ref": format!("#/$defs/d{}", i + 1) }, { "$ref": format!("#/$defs/d{}", i + 1) }] }))).chain([("d40".into(), json!({ "type": "integer" }))]).collect();
    vec![
        ("gbnf class", lark(gbnf)),
        ("gbnf small class", lark(gbnf2)),
        ("gbnf many classes", lark(format!("root ::= ({})*", many.join(" | ")))),
        ("gbnf rooms", lark(format!("root ::= ({})* root?", "[a-y]? ".repeat(5000)))),
        ("gbnf alts", lark(format!("root ::= \"x\" root | {}", "(\"a\" | \"ab\" | [^a]+ ) ".repeat(1500)))),
        ("multipleOf", schema(json!({ "type": "integer", "multipleOf": 499_979 }))),
        ("multipleOf 9973", schema(json!({ "type": "integer", "multipleOf": 9973 }))),
        ("multipleOf 9973 number", schema(json!({ "type": "number", "multipleOf": 9973 }))),
        ("multipleOf .4999", schema(json!({ "type": "number", "multipleOf": 0.1999 }))),
        (
            "multipleOf 9973 min",
            schema(
                json!({ "type": "integer", "multipleOf": 9973, "minimum": 123_456_789, "maximum": 987_654_321_012_i64 }),
            ),
        ),
        ("allOf primes", schema(json!({ "type": "integer", "allOf": primes }))),
        ("400 ranges", schema(json!({ "type": "array", "prefixItems": ranges }))),
        ("anyOf ranges", schema(json!({ "anyOf": ranges }))),
        ("many props", schema(json!({ "type": "object", "properties": props(2500, json!({ "type": "string" })) }))),
        (
            "many required",
            schema(
                json!({ "type": "object", "properties": props(1500, json!({ "enum": ["a", "b"] })), "required": (0..1500).map(|i| format!("p{i}")).collect::<Vec<_>>() }),
            ),
        ),
        ("nested", schema(nested)),
        (
            "long strings",
            schema(
                json!({ "type": "object", "properties": props(900, json!({ "type": "string", "minLength": 100, "maxLength": 100_000 })) }),
            ),
        ),
        ("long pattern", schema(json!({ "type": "string", "pattern": "(a|b)*a(a|b){20}", "minLength": 5000 }))),
        (
            "patterns",
            schema(
                json!({ "allOf": (0..30).map(|i| json!({ "type": "string", "pattern": format!("(a|b)*a(a|b){{{i}}}c?") })).collect::<Vec<_>>() }),
            ),
        ),
        (
            "items",
            schema(json!({ "type": "array", "minItems": 50_000, "items": { "type": "array", "minItems": 50_000 } })),
        ),
        (
            "items2",
            schema(
                json!({ "type": "array", "maxItems": 1_000_000_000, "minItems": 900_000_000, "items": { "type": "integer" } }),
            ),
        ),
        ("defs", schema(json!({ "$ref": "#/$defs/d0", "$defs": defs }))),
        ("regex repeat", GrammarSource::Regex("(a|b|ab)*c{1,1000}(d?){500}d{500}".into())),
        ("regex dots", GrammarSource::Regex("(.{0,400}a.{0,400}){20}".into())),
        ("regex big", GrammarSource::Regex("((a{0,1000}){0,1000}b){0,1000}".into())),
        ("regex not", GrammarSource::Regex("[a-z]{0,4000}[^b]{0,4000}x".into())),
        ("regex exp", GrammarSource::Regex("(a|b)*a(a|b){2000}".into())),
        ("regex classes", GrammarSource::Regex(format!("(\\p{{L}}|[{class}]){{1,200}}"))),
        ("regex many", GrammarSource::Regex((0..6000).map(|i| format!("x{i:x}.*")).collect::<Vec<_>>().join("|"))),
        ("regex unicode", GrammarSource::Regex("\\p{L}{1,3000}\\w{1,3000}\\d{1,3000}".into())),
        ("regex letters", GrammarSource::Regex("\\p{L}|".repeat(8000) + "x")),
        (
            "regex letters2",
            GrammarSource::Regex(
                (0..4000).map(|i| format!("[\\p{{L}}{}]", char::from_u32(0x2600 + i).unwrap_or('x'))).collect(),
            ),
        ),
        (
            "regex words",
            GrammarSource::Regex((0..6000).map(|i| format!("\\w{{{}}}x", i % 900)).collect::<Vec<_>>().join("|")),
        ),
        ("regex case", GrammarSource::Regex(format!("(?i){}", "k\u{17f}".repeat(9000)))),
        (
            "lark letters",
            lark(format!(
                "start: {}\n{}",
                (0..2500).map(|i| format!("T{i}")).collect::<Vec<_>>().join(" "),
                (0..2500).map(|i| format!("T{i}: /\\p{{L}}{i}/")).collect::<Vec<_>>().join("\n")
            )),
        ),
        (
            "lark and",
            lark(
                "start: A\nA: /(a|b)*a(a|b){30}/ & /(a|b)*b(a|b){31}/ & /(a|b)*a(a|b){32}/ & ~/(a|b)*b(a|b){33}/"
                    .into(),
            ),
        ),
        ("lark json", lark("start: %json { \"type\": \"integer\", \"multipleOf\": 499979 }".into())),
        ("lark rep", lark("start: a{0,100000}\na: b{0,100000}\nb: \"x\"{0,100000} \"y\"".into())),
        (
            "lark many",
            lark(format!(
                "start: {}\n{}",
                (0..3000).map(|i| format!("r{i}")).collect::<Vec<_>>().join(" | "),
                (0..3000).map(|i| format!("r{i}: \"{i}\"")).collect::<Vec<_>>().join("\n")
            )),
        ),
        ("choice", GrammarSource::Choice((0..8000).map(|i| format!("{i}-{}", i * 7)).collect())),
        ("choice long", GrammarSource::Choice((0..6).map(|i| format!("{i}").repeat(10_000)).collect())),
        ("substr", lark(format!("start: %regex {{ \"substring_chars\": \"{}\" }}", "abcab".repeat(12_000)))),
    ]
}

/// Memory at a time, and all that is allocated, which bounds the work.
const MAX_PEAK: usize = 200 << 20;
const MAX_TOTAL: usize = 1 << 30;

#[test]
fn hostile_constraints_are_compiled_in_bounded_memory() {
    let work = || {
        let structures = Structures::new(Limits::DEFAULT);
        structures.constraint(&vocabulary, &GrammarSource::Choice(vec!["x".into()])).expect("a constraint");
        for (name, form) in hostile() {
            let (before, total) = (NOW.load(Ordering::Relaxed), TOTAL.load(Ordering::Relaxed));
            PEAK.store(before, Ordering::Relaxed);
            // refused or not
            let _ = structures.constraint(&vocabulary, &form);
            let (peak, total) = (PEAK.load(Ordering::Relaxed) - before, TOTAL.load(Ordering::Relaxed) - total);
            assert!(peak < MAX_PEAK && total < MAX_TOTAL, "{name}: {} MB at a time, {} MB", peak >> 20, total >> 20);
        }
    };
    let thread = std::thread::Builder::new().stack_size(Limits::DEFAULT.stack()).spawn(work);
    thread.expect("a thread").join().expect("no panic");
}
