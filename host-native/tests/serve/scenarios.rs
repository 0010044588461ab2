//! Scenarios of users: retrieval-augmented answers, many kinds of requests at once, and more load than the server takes.

use std::thread;

use serde_json::{Value, json};

use crate::admin_client::reference;
use crate::server::{Response, Server, fixture};

const TINY: &str = "starling-tiny/starling-tiny-q8_0.gguf";

/// A server with a model that chats and one that embeds.
fn start(more: &[&str]) -> Server {
    let (chat, embed) = (format!("chat={}", fixture(TINY)), format!("embed={}", reference("bert-mean-f32")));
    Server::start(&[&["-m", &chat, "-m", &embed], more].concat())
}

const DOCUMENTS: [&str; 6] = [
    "The dog lives in the red house by the lake.",
    "Tom has a kite and a ball, and flies the kite on windy days.",
    "The library opens at nine and closes at six.",
    "Lena bakes bread with her grandmother each Sunday.",
    "The train to the sea leaves from the second platform.",
    "A cat sleeps on the warm stone wall behind the school.",
];

fn vectors(server: &Server, texts: &[&str]) -> Vec<Vec<f64>> {
    let response = server.ok("/v1/embeddings", &json!({ "model": "embed", "input": texts }));
    let vector = |item: &Value| -> Vec<f64> {
        item["embedding"].as_array().expect("a vector").iter().map(|x| x.as_f64().expect("a number")).collect()
    };
    response["data"].as_array().expect("vectors").iter().map(vector).collect()
}

/// The documents most like a question, the best first.
fn retrieve(server: &Server, index: &[Vec<f64>], question: &str) -> Vec<usize> {
    let query = vectors(server, &[question]).remove(0);
    let score = |vector: &Vec<f64>| vector.iter().zip(&query).map(|(a, b)| a * b).sum::<f64>();
    let mut order: Vec<usize> = (0..index.len()).collect();
    order.sort_by(|a, b| score(&index[*b]).total_cmp(&score(&index[*a])));
    order
}

/// A question about retrieved documents, which come first so that the next question finds them in the prefix cache.
fn question(documents: &[usize], text: &str, salt: &str) -> Value {
    let context: Vec<&str> = documents.iter().map(|i| DOCUMENTS[*i]).collect();
    let system = format!("Answer by these documents:\n{}", context.join("\n"));
    json!({ "model": "chat", "temperature": 0, "max_tokens": 12, "cache_salt": salt, "messages": [
        { "role": "system", "content": system }, { "role": "user", "content": text },
    ] })
}

#[test]
fn answers_by_retrieved_documents() {
    let server = start(&[]);
    let index = vectors(&server, &DOCUMENTS);
    // a document is most like itself, alone and in a batch
    for (i, text) in DOCUMENTS.iter().enumerate() {
        assert_eq!(retrieve(&server, &index, text)[0], i);
    }
    let found = retrieve(&server, &index, DOCUMENTS[3]);
    let best = &found[..2];
    let ask = |text: &str, salt: &str| server.ok("/v1/chat/completions", &question(best, text, salt));
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    let text = |answer: &Value| answer["choices"][0]["message"]["content"].clone();
    let first = ask("Who bakes?", "a");
    let second = ask("When does she bake?", "a");
    assert_eq!(cached(&first), Some(0));
    assert!(cached(&second) > Some(0), "the documents are not computed again: {second}");
    // the cache changes no byte
    let cold = ask("When does she bake?", "b");
    assert_eq!((cached(&cold), text(&cold)), (Some(0), text(&second)));
    let mut streamed = question(best, "When does she bake?", "a");
    streamed["stream"] = json!(true);
    let chunks = server.post("/v1/chat/completions", &streamed).chunks();
    let joined: String = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(json!(joined), text(&second));
}

/// Requests of several kinds of users: path, body, and the parts of the response that the request determines.
fn mixed() -> Vec<(&'static str, Value, &'static [&'static str])> {
    let chat = |text: &str| json!([{ "role": "user", "content": text }]);
    let schema =
        json!({ "type": "object", "properties": { "age": { "type": "integer", "maximum": 9 } }, "required": ["age"] });
    vec![
        (
            "/v1/chat/completions",
            json!({ "model": "chat", "messages": chat("Tell me a story."), "max_tokens": 30, "seed": 1, "priority": "high" }),
            &["choices"],
        ),
        (
            "/v1/completions",
            json!({ "model": "chat", "prompt": "Once upon a time", "max_tokens": 20, "seed": 2, "n": 2, "logprobs": 2 }),
            &["choices"],
        ),
        (
            "/v1/chat/completions",
            json!({ "model": "chat", "messages": chat("How old?"), "max_tokens": 40, "seed": 3,
                    "response_format": { "type": "json_schema", "json_schema": { "schema": schema } } }),
            &["choices"],
        ),
        (
            "/v1/generate",
            json!({ "model": "chat", "prompt": "The dog ".repeat(40), "max_tokens": 8, "seed": 4, "priority": "low",
                    "logprobs": true, "top_logprobs": 2 }),
            &["text", "tokens", "logprobs"],
        ),
        ("/v1/embeddings", json!({ "model": "embed", "input": DOCUMENTS }), &["data"]),
        ("/v1/tokenize", json!({ "model": "chat", "text": DOCUMENTS[0] }), &["tokens"]),
        (
            "/api/chat",
            json!({ "model": "chat", "messages": chat("Hi"), "stream": false, "options": { "num_predict": 9, "seed": 5 } }),
            &["message"],
        ),
    ]
}

/// Users of all kinds at once get what each gets alone.
#[test]
fn a_mixed_workload_changes_no_answer() {
    let server = start(&["--max-seqs", "4"]);
    let all = mixed();
    let ask = |(path, body, parts): &(&str, Value, &[&str])| {
        let response = server.ok(path, body);
        parts.iter().map(|part| response[*part].clone()).collect::<Vec<_>>()
    };
    let alone: Vec<_> = all.iter().map(ask).collect();
    assert!(alone.iter().flatten().all(|part| !part.is_null()), "{alone:?}");
    // each log-probability belongs to its token
    let (tokens, logprobs) = (alone[3][1].as_array().map(Vec::len), alone[3][2].as_array().expect("a list"));
    assert_eq!(Some(logprobs.len()), tokens);
    assert!(logprobs.iter().all(|one| one["logprob"].as_f64() <= Some(0.0) && one["top_logprobs"].is_array()));
    thread::scope(|scope| {
        for user in 0..3 {
            for (i, request) in all.iter().enumerate() {
                let (ask, alone) = (&ask, &alone);
                scope.spawn(move || assert_eq!(ask(request), alone[i], "user {user}: {}", request.0));
            }
        }
    });
    server.wait("nothing is left", |stats| {
        stats["running"] == 0 && stats["kv"]["in_use_bytes"] == 0 && stats["texts_waiting"] == 0
    });
}

/// Waves of clients, more from one to the next. Beyond its limits the server refuses at once and says when to come again;
/// what it accepts it answers as ever, and afterwards it is as before.
#[test]
fn beyond_its_limits_the_server_refuses_and_recovers() {
    let server = Server::start(&["--max-seqs", "2", "--queue-high", "6", "--queue-low", "2"]);
    let body = json!({ "prompt": "Once upon a time", "max_tokens": 24, "seed": 7, "ignore_eos": true });
    let ask = || server.post("/v1/completions", &body);
    let text = |response: &Response| response.json()["choices"][0]["text"].clone();
    let expected = text(&ask());
    let (mut n_answered, mut n_refused) = (1, 0);
    for n_clients in [2, 8, 32] {
        let responses: Vec<Response> = thread::scope(|scope| {
            let clients: Vec<_> = (0..n_clients).map(|_| scope.spawn(ask)).collect();
            // probes answer under any load
            assert_eq!(server.get("/livez").status, 200);
            clients.into_iter().map(|client| client.join().expect("a response")).collect()
        });
        let (answered, refused): (Vec<_>, Vec<_>) = responses.iter().partition(|response| response.status == 200);
        assert!(answered.iter().all(|response| text(response) == expected));
        for response in &refused {
            assert_eq!((response.status, response.header("retry-after")), (429, Some("1")), "{}", response.text());
            assert_eq!(response.json()["error"]["code"], "queue_full");
        }
        // as many as may run are answered, however many come
        assert!(answered.len() >= 2, "{} of {n_clients}", answered.len());
        assert!(n_clients > 2 || refused.is_empty(), "no request is refused below the limits");
        (n_answered, n_refused) = (n_answered + answered.len(), n_refused + refused.len());
        server.wait("nothing is left", |stats| stats["running"] == 0 && stats["waiting"]["normal"] == 0);
    }
    assert!(n_refused > 0, "32 clients are more than a queue of 6 takes");
    assert_eq!((server.get("/readyz").status, text(&ask())), (200, expected));
    let metrics = server.wait_metrics(&format!("outcome=\"length\"}} {}\n", n_answered + 1));
    assert!(metrics.contains(&format!("reason=\"queue_full\"}} {n_refused}\n")), "{metrics}");
    assert!(metrics.contains("starling_tenant_requests_total{tenant=\"default\"}"), "{metrics}");
}
