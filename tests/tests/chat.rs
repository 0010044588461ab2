//! Chat templates render as jinja2 in the configuration of transformers; cases by `tests/scripts/make_chat_cases.py`.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use starling::chat::{
    ChatError, ChatLimits, ChatRequest, ChatTemplate, Json, Now, builtin_template, builtin_template_names,
};
use starling::gguf::{Gguf, GgufWriter, Value};
use starling::tokenizer::{EncodeOptions, Tokenizer};

const NOW: Now = Now { year: 2025, month: 3, day: 9, hour: 14, minute: 5, second: 7 };

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A tokenizer of all byte tokens and some control tokens.
fn tokenizer() -> Tokenizer {
    let mut tokens: Vec<String> = (0..=255u8).map(|byte| format!("<0x{byte:02X}>")).collect();
    let n_bytes = tokens.len();
    let controls = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "[INST]", "[/INST]"];
    tokens.extend(controls.map(String::from));
    let types: Vec<i32> = (0..tokens.len()).map(|id| if id < n_bytes { 6 } else { 3 }).collect();
    let mut w = GgufWriter::new();
    w.str("tokenizer.ggml.model", "llama").expect("valid");
    w.str_array("tokenizer.ggml.tokens", &tokens).expect("valid");
    w.i32_array("tokenizer.ggml.token_type", &types).expect("valid");
    w.f32_array("tokenizer.ggml.scores", &vec![0.0; tokens.len()]).expect("valid");
    w.metadata("tokenizer.ggml.bos_token_id", &Value::U32(n_bytes as u32)).expect("valid");
    w.metadata("tokenizer.ggml.eos_token_id", &Value::U32(n_bytes as u32 + 1)).expect("valid");
    w.metadata("tokenizer.ggml.add_space_prefix", &Value::Bool(false)).expect("valid");
    Tokenizer::from_gguf(&Gguf::parse(&w.header()).expect("valid")).expect("valid")
}

fn field<'j>(json: &'j Json, name: &str) -> Option<&'j Json> {
    match json {
        Json::Object(items) => items.iter().find(|(key, _)| key == name).map(|(_, value)| value),
        _ => None,
    }
}

fn array(json: Option<&Json>) -> &[Json] {
    match json {
        Some(Json::Array(items)) => items,
        _ => &[],
    }
}

fn request(conversation: &Json) -> ChatRequest {
    let variables = match field(conversation, "variables") {
        Some(Json::Object(items)) => items.clone(),
        _ => Vec::new(),
    };
    let messages = array(field(conversation, "messages")).to_vec();
    ChatRequest {
        messages,
        tools: field(conversation, "tools").cloned(),
        variables,
        now: Some(NOW),
        ..ChatRequest::default()
    }
}

#[test]
fn texts_of_jinja2() {
    let cases: Json =
        serde_json::from_slice(&std::fs::read(root().join("fixtures/chat/cases.json")).expect("valid")).expect("valid");
    let conversations = array(field(&cases, "conversations"));
    let (tokenizer, mut wrong) = (tokenizer(), 0);
    let cases = array(field(&cases, "cases"));
    assert!(cases.len() > 200);
    for case in cases {
        let (Some(Json::Str(path)), Some(Json::Int(n))) = (field(case, "template"), field(case, "conversation")) else {
            panic!("{case:?}")
        };
        let template = ChatTemplate::new(&std::fs::read_to_string(root().join(path)).expect("valid"));
        let add_generation_prompt = field(case, "add_generation_prompt") == Some(&Json::Bool(true));
        let request = ChatRequest { add_generation_prompt, ..request(&conversations[*n as usize]) };
        let result = template.and_then(|template| template.render(&request, &tokenizer));
        let agrees = match (field(case, "text"), &result) {
            (Some(Json::Str(text)), Ok(rendered)) => *text == rendered.text,
            (Some(error @ Json::Object(_)), Err(ChatError::Refused(message))) => {
                field(error, "error") == Some(&Json::Str(message.clone()))
            }
            (Some(Json::Object(_)), Err(_)) => true,
            _ => false,
        };
        if !agrees {
            eprintln!("{path}, conversation {n}\n   {result:?}\n   {:?}", field(case, "text"));
            wrong += 1;
        }
    }
    assert_eq!(wrong, 0);
}

/// Short templates render as in jinja2; those that jinja2 refuses are refused.
#[test]
fn snippets_of_jinja2() {
    let cases: Json =
        serde_json::from_slice(&std::fs::read(root().join("fixtures/chat/snippets.json")).expect("valid"))
            .expect("valid");
    let mut wrong = Vec::new();
    for case in array(Some(&cases)) {
        let Some(Json::Str(source)) = field(case, "template") else { panic!("{case:?}") };
        let variables = vec![("text".to_string(), Json::Str("abcde".into()))];
        let request = ChatRequest { variables, now: Some(NOW), ..ChatRequest::default() };
        let result = ChatTemplate::new(source).and_then(|template| template.render(&request, &tokenizer()));
        let agrees = match (field(case, "text"), &result) {
            (Some(Json::Str(text)), Ok(rendered)) => *text == rendered.text,
            (Some(Json::Object(_)), result) => result.is_err(),
            _ => false,
        };
        if !agrees {
            wrong.push(format!("{source}\n   {result:?}\n   {:?}", field(case, "text")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Generated expressions render as in jinja2. Where jinja2 refuses one, it may be refused or render.
#[test]
fn expressions_of_jinja2() {
    let file = std::fs::read(root().join("fixtures/chat/expressions.json")).expect("valid");
    let cases: Json = serde_json::from_slice(&file).expect("valid");
    let (tokenizer, mut wrong) = (tokenizer(), Vec::new());
    for case in array(Some(&cases)) {
        let (Some(Json::Str(source)), Some(Json::Str(text))) = (field(case, "template"), field(case, "text")) else {
            continue;
        };
        let request = ChatRequest { now: Some(NOW), ..ChatRequest::default() };
        let result = ChatTemplate::new(source).and_then(|template| template.render(&request, &tokenizer));
        if result.as_ref().map(|rendered| &rendered.text) != Ok(text) {
            let found = result.map(|rendered| rendered.text).map_err(|e| e.to_string());
            wrong.push(format!("{source}\n   {found:?}\n   {text:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} of them:\n{}", wrong.len(), wrong.join("\n"));
}

/// Checks that messages add no control tokens to those of the template.
fn check_controls(content: &str, source: &str) {
    let (tokenizer, template) = (tokenizer(), ChatTemplate::new(source).expect("valid"));
    let count = |content: &str| {
        let request = ChatRequest { messages: vec![Json::message("user", content)], ..ChatRequest::default() };
        let ids = template.render(&request, &tokenizer).expect("valid").encode(&tokenizer);
        ids.iter().filter(|&&id| tokenizer.is_control(id)).count()
    };
    assert_eq!(count(content), count("x"), "{content:?} {source:?}");
}

const USES: [&str; 8] = [
    "<|im_start|>{{ messages[0].content }}<|im_end|>",
    "<|im_start|>{{ messages[0].content | trim }}<|im_end|>",
    "<|im_start|>{{ messages[0].content[1:] }}<|im_end|>",
    "<|im_start|>{{ messages[0].content | lower }}<|im_end|>",
    "<|im_start|>{{ messages[0].content | tojson }}<|im_end|>",
    "<|im_start|>{{ messages | tojson(indent=2) }}<|im_end|>",
    "<|im_start|>{{ messages[0].content.split('e') | join('e') }}<|im_end|>",
    "<|im_start|>{{ messages[0].content.title() }}m_end|>",
];

proptest! {
    #[test]
    fn contents_spell_no_control_token(
        parts in prop::collection::vec("<\\|im_end\\|>|<s>|</S>|<\\|IM_|end\\|>|\\[INST\\]|[<|i\u{f0000}\u{10fffd}]|(?s).", 0..8),
        use_ in 0usize..8,
    ) {
        check_controls(&parts.concat(), USES[use_]);
    }
}

#[test]
fn ordinary_text_has_the_ids_of_the_whole() {
    let tokenizer = tokenizer();
    for name in builtin_template_names() {
        let template = ChatTemplate::new(starling::chat::builtin_template(name).expect("valid")).expect("valid");
        let messages = vec![Json::message("user", "a <b> [c] </"), Json::message("assistant", "|im_")];
        let rendered = template.render(&ChatRequest { messages, ..ChatRequest::default() }, &tokenizer).expect("valid");
        let options = EncodeOptions { add_special: false, parse_special: true };
        assert_eq!(rendered.encode(&tokenizer), tokenizer.encode(&rendered.text, options), "{name}");
    }
}

#[test]
fn limits_and_errors() {
    let tokenizer = tokenizer();
    let limits = ChatLimits { fuel: 10_000, recursion: 20, output_bytes: 1000, work_bytes: 1 << 20 };
    let render = |source: &str| {
        let request = ChatRequest { messages: vec![Json::message("user", "x")], ..ChatRequest::default() };
        ChatTemplate::with_limits(source, limits).and_then(|t| t.render(&request, &tokenizer)).map(|r| r.text)
    };
    let long = "{% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}";
    assert!(matches!(render(long), Err(ChatError::Limit { what: "instructions", limit: 10_000 })));
    let wide = "{% for i in range(500) %}abc{% endfor %}";
    assert!(matches!(render(wide), Err(ChatError::Limit { what: "bytes of text", limit: 1000 })));
    assert!(render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").is_err());
    assert_eq!(render("{{ raise_exception('no: ' + 'x') }}"), Err(ChatError::Refused("no: x".into())));
    assert!(matches!(render("a\n{% if %}"), Err(ChatError::Template { line: 2, .. })));
    assert!(matches!(render("a\nb\n{{ nothing.at.all }}"), Err(ChatError::Template { line: 3, .. })));
    assert!(matches!(render("{{ strftime_now('%Y') }}"), Err(ChatError::Template { line: 1, .. })));
    assert_eq!(Now::from_unix(1_741_529_107), NOW);
    assert_eq!(Now::from_unix(-1).format("%F %T %a"), "1969-12-31 23:59:59 Wed");
}

fn render(source: &str) -> Result<String, ChatError> {
    let request = ChatRequest { messages: vec![Json::message("user", "abcde")], ..ChatRequest::default() };
    ChatTemplate::new(source)?.render(&request, &tokenizer()).map(|rendered| rendered.text)
}

/// Extensions of the template library beyond Jinja are refused, as in transformers.
#[test]
fn words_are_those_of_jinja() {
    for word in ["chain([2])", "zip([2])", "lines", "split", "bool"] {
        let wanted = format!("filter {} is unknown", word.split('(').next().unwrap());
        let result = render(&format!("{{{{ [1] | {word} }}}}"));
        assert!(matches!(&result, Err(ChatError::Template { message, .. }) if message.contains(&wanted)), "{result:?}");
    }
    assert!(render("{{ debug() }}").is_err() && render("{{ 'a' is startingwith 'a' }}").is_err());
    assert_eq!(render("{{ [3, 1] | sort | join('-') }}{{ 2 is eq 2 }}{{ [1] | count }}"), Ok("1-3True1".into()));
}

/// Slices behave as in Python, and no bounds panic.
#[test]
fn slices() {
    let python = [
        ("''[::-1]", ""),
        ("[][::-1] | length", "0"),
        ("'abcde'[::-1]", "edcba"),
        ("'abcde'[3:0:-1]", "dcb"),
        ("'abcde'[0:3:-1]", ""),
        ("'abcde'[-2::-2]", "db"),
        ("'abcde'[:-9:-1]", "edcba"),
        ("'abcde'[9:-9:-3]", "eb"),
        ("'abcde'[1:4:2]", "bd"),
        ("'abcde'[-3:-1]", "cd"),
        ("'abcde'[::9223372036854775807]", "a"),
        ("'abcde'[::-9223372036854775807]", "e"),
        ("'abcde'[-9223372036854775807:9223372036854775807:4294967296]", "a"),
        ("(messages[::-1] | first).content[1:][::-1]", "edcb"),
    ];
    for (expression, expected) in python {
        let source = ["{{ ", expression, " }}"].concat();
        assert_eq!(render(&source), Ok(expected.into()), "{expression}");
    }
    assert!(matches!(render("{{ 'a'[::0] }}"), Err(ChatError::Template { line: 1, .. })));
    // what cannot be sliced is undefined
    assert_eq!(render("{{ {}[::1] }}{{ none[:1] is defined }}"), Ok("False".into()));
}

/// Nesting that would overflow the template library's recursive parser is refused; on a thread's default stack.
#[test]
fn templates_that_nest_deeply() {
    let deep = |n: usize| {
        [
            "{{ ".to_string() + &"-".repeat(n) + "1 }}",
            "{{ ".to_string() + &"not ".repeat(n) + "1 }}",
            "{{ 1".to_string() + &" + 1".repeat(n) + " }}",
            "{{ 'x'".to_string() + &" ~ '}}'".repeat(n) + " }}",
            "{{ 'x'".to_string() + &"|string".repeat(n) + " }}",
            "{{ a".to_string() + &".a".repeat(n) + " }}",
            "{{ a".to_string() + &"['a']".repeat(n) + " }}",
            "{{ f".to_string() + &"()".repeat(n) + " }}",
            "{{ ".to_string() + &"1 if 1 else ".repeat(n) + "1 }}",
            "{{ {'a': {'b': {}}} ~ ".to_string() + &"-".repeat(n) + "1 }}",
            "{% if a ".to_string() + &"and a ".repeat(n) + "%}{% endif %}",
            "{# {{ #}{%- if 0 %}".to_string() + &"{%- elif 0 %}".repeat(n) + "{% endif %}",
            "{% if 0 %}".to_string() + &"{%+ elif 0 %}".repeat(n) + "{% endif %}",
            // quotes in comments and raw blocks do not open a string
            "{# {{ \" #}{{ 1".to_string() + &" + 1".repeat(n) + " }}",
            "{% raw %} {{ ' {% endraw %}{{ 1".to_string() + &" + 1".repeat(n) + " }}",
            "{{ 1".to_string() + &" % 1 == 1 > 1 // 1 ** 1".repeat(n / 5) + " }}",
        ]
    };
    let check = move || {
        for source in deep(50_000) {
            let refused = ChatTemplate::new(&source);
            assert!(matches!(refused, Err(ChatError::Limit { .. })), "{}: {refused:?}", &source[..30]);
        }
        for source in deep(100) {
            ChatTemplate::new(&source).expect("a template");
        }
        // at the limit
        for source in deep(250) {
            ChatTemplate::new(&source).expect("a template");
        }
        for source in deep(900) {
            let _ = ChatTemplate::new(&source);
        }
        let table = "{% set t = {".to_string() + &"'key': 'value', ".repeat(10_000) + "} %}";
        ChatTemplate::new(&table).expect("entries of a table nest nothing");
        // text outside of tags does not nest
        ChatTemplate::new(&"- elif 1 } \" ".repeat(50_000)).expect("a text");
    };
    std::thread::Builder::new().stack_size(1 << 20).spawn(check).expect("a thread").join().expect("no panic");
}

/// Templates that double, repeat or nest their values hit a limit soon and in little memory.
#[test]
fn hostile_templates() {
    let double = |step: &str| {
        ["{% set ns = namespace(a='xxxxxxxx', l=[1]) %}{% for i in range(99) %}", step, "{% endfor %}"].concat()
    };
    let hostile = [
        double("{% set ns.a = ns.a ~ ns.a %}"),
        double("{% set ns.a = ns.a + ns.a %}"),
        double("{% set ns.a = ns.a * 9 %}"),
        double("{% set ns.a = 9 * ns.a %}"),
        double("{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}"),
        double("{% set ns.a = ns.a.replace('', ns.a) %}"),
        double("{% set ns.a = ns.a | replace('x', 'xxx') %}"),
        double("{% set ns.a = ns.a.join([ns.a, ns.a]) %}"),
        double("{% set ns.a = [ns.a, ns.a] | join(ns.a) %}"),
        double("{% set ns.a = '{}{}'.format(ns.a, ns.a) %}"),
        double("{% set ns.a = '%s%s' | format(ns.a, ns.a) %}"),
        double("{% set ns.a = [ns.a, ns.a] | tojson %}"),
        double("{% set ns.a = [ns.a, ns.a] | string %}"),
        double("{% filter upper %}{% set ns.a = ns.a ~ ns.a %}{{ ns.a }}{% endfilter %}"),
        double("{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns.a = f(ns.a) %}"),
        double("{% set ns.l = ns.l + ns.l %}"),
        double("{% set ns.l = ns.l * 9 %}"),
        double("{% set ns.l = (ns.l * 9) | map('string') | list %}"),
        double("{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l }}",
        double("{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l == [1] }}",
        double("{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l | tojson }}",
        double("{% set ns.l = {'a': ns.l, 'b': ns.l} %}") + "{{ ns.l ~ '' }}",
        "{{ 'x' | indent(99999999999) }}".into(),
        "{{ 'x\nx' | indent(width=99999999999) }}".into(),
        "{{ '%99999999999d' | format(1) }}".into(),
        "{{ '%*d' | format(99999999999, 1) }}".into(),
        "{{ '{:>99999999999}'.format(1) }}".into(),
        "{{ 'x' * 99999999 }}".into(),
        "{{ [1] | batch(9999999999, 1) | list }}".into(),
        "{{ [1] | slice(9999999999, 1) | list }}".into(),
        "{{ (['x' * 1000000] * 1000) | map('upper') | list | length }}".into(),
        "{{ (['x' * 1000000] * 1000) | sum }}".into(),
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}".into(),
        "{% for i in range(100000) %}{% for j in range(100000) %}".to_string()
            + &"x".repeat(5000)
            + "{% endfor %}{% endfor %}",
    ];
    for source in hostile {
        let result = render(&source);
        let known = matches!(result, Err(ChatError::Limit { .. } | ChatError::Template { line: 1, .. }));
        assert!(known, "{source}: {result:?}");
    }
    // values are dropped recursively, so their nesting is limited, however they are built
    let loop_of = |start: &str, step: &str| {
        ["{% set ns = namespace(", start, ") %}{% for i in range(100000) %}", step, "{% endfor %}"].concat()
    };
    for deep in [
        loop_of("l=[]", "{% set ns.l = [ns.l] %}"),
        loop_of("l=[]", "{% set ns.l = (ns.l,) %}"),
        loop_of("l={}", "{% set ns.l = {'a': ns.l} %}"),
        loop_of("l={}", "{% set ns.l = dict(a=ns.l) %}"),
        loop_of("l=[1]", "{% set ns.l = ns.l | batch(1) | list %}"),
        loop_of("l=[1]", "{% set ns.l = ns.l | batch(1) %}"),
        loop_of("l=[1]", "{% set ns.l = ns.l | slice(1) %}"),
        loop_of("p=1", "{% set n = namespace(p=ns.p) %}{% set ns.p = n %}"),
        loop_of("p=1", "{% set ns.p = ns %}"),
    ] {
        assert!(matches!(render(&deep), Err(ChatError::Limit { .. } | ChatError::Template { line: 1, .. })), "{deep}");
    }
    for flat in [
        loop_of("l=[1]", "{% set ns.l = ns.l | list %}"),
        loop_of("l=[1]", "{% set ns.l = ns.l | reverse %}"),
        loop_of("l=[1]", "{% set ns.l = ns.l[::1] %}"),
        loop_of("l=[1]", "{% set ns.l = ns.l + [] %}"),
        loop_of("l='x'", "{% set ns.l = ns.l ~ '' %}"),
    ] {
        assert_eq!(render(&flat), Ok(String::new()), "{flat}");
    }
}

/// A variable of the request does not take the place of what the engine sets.
#[test]
fn variables_that_the_engine_sets_are_refused() {
    let template = ChatTemplate::new("{{ messages[0].content }}{{ x }}").expect("valid");
    let render = |name: &str| {
        let variables = vec![(name.to_string(), Json::Str("v".into()))];
        let request = ChatRequest { messages: vec![Json::message("user", "m")], variables, ..ChatRequest::default() };
        template.render(&request, &tokenizer()).map(|rendered| rendered.text)
    };
    for name in ["messages", "tools", "bos_token", "eos_token", "add_generation_prompt", "raise_exception", "range"] {
        assert_eq!(render(name), Err(ChatError::Reserved(name.into())));
    }
    assert_eq!((render("x"), render("documents")), (Ok("mv".into()), Ok("m".into())));
}

#[test]
fn developers_are_the_system_where_a_template_has_no_such_role() {
    let tokenizer = tokenizer();
    let text = |source: &str, role: &str| {
        let messages = vec![Json::message(role, "MARK"), Json::message("user", "Hi")];
        let request = ChatRequest { messages, add_generation_prompt: true, now: Some(NOW), ..ChatRequest::default() };
        ChatTemplate::new(source).expect("valid").render(&request, &tokenizer).map(|rendered| rendered.text)
    };
    let folder = std::fs::read_dir(root().join("fixtures/chat")).expect("a folder");
    let files =
        folder.map(|file| file.expect("a file").path()).filter(|path| path.extension().is_some_and(|e| e == "jinja"));
    let mut sources: Vec<String> = files.map(|path| std::fs::read_to_string(path).expect("a template")).collect();
    sources.extend(builtin_template_names().filter_map(builtin_template).map(str::to_string));
    assert!(sources.len() > 20);
    for source in &sources {
        assert!(!source.contains("developer"), "has the role: {source}");
        assert_eq!(text(source, "developer"), text(source, "system"), "{source}");
        if let Ok(text) = text(source, "developer") {
            assert!(text.contains("MARK") && !text.contains("developer"), "{text}");
        }
    }
    let own = "{% for m in messages %}[{{ m.role }}{% if m.role == 'developer' %}!{% endif %}]{% endfor %}";
    assert_eq!(text(own, "developer"), Ok("[developer!][user]".into()));
}

#[test]
fn a_final_message_is_continued_where_it_ends() {
    let tokenizer = tokenizer();
    let render = |source: &str, role: &str, content: &str| {
        let messages = vec![Json::message("user", "Hi"), Json::message(role, content)];
        let (add_generation_prompt, continue_final_message) = (true, true);
        let request = ChatRequest { messages, add_generation_prompt, continue_final_message, ..ChatRequest::default() };
        ChatTemplate::new(source).expect("valid").render(&request, &tokenizer)
    };
    for name in builtin_template_names() {
        let source = builtin_template(name).expect("a template");
        let rendered = render(source, "assistant", "It is a  ").unwrap_or_else(|e| panic!("{name}: {e}"));
        // trimmed by the template at most, and nothing follows
        assert!(rendered.text.trim_end().ends_with("It is a"), "{name}: {:?}", rendered.text);
        assert!(rendered.literals.iter().all(|at| *at < rendered.text.len()));
    }
    let chatml = builtin_template("chatml").expect("a template");
    let text = render(chatml, "assistant", "It <|im_end|> is ").expect("valid").text;
    assert!(text.ends_with("<|im_start|>assistant\nIt <|im_end|> is "), "{text:?}");
    assert!(matches!(render(chatml, "user", "Hi"), Err(ChatError::Continue(_))));
    // a text with the mark does not move the end
    assert!(matches!(render(chatml, "assistant", "starling-continues-here x"), Err(ChatError::Continue(_))));
    assert!(matches!(render("{{ messages[0].content }}", "assistant", "Hi"), Err(ChatError::Continue(_))));
}
