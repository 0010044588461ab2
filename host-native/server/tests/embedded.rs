//! The server inside of another program.

#[path = "../examples/embedded.rs"]
#[allow(dead_code)]
mod example;

use std::io::{Read, Write};
use std::net::TcpStream;

fn ask(url: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(url.strip_prefix("http://").expect("an address")).expect("a server");
    stream.write_all(request.as_bytes()).expect("a connection");
    let mut response = String::new();
    stream.read_to_string(&mut response).expect("a response");
    response
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_serves_the_bundled_model() {
    let server = example::start().await.expect("a server");
    let url = server.url().to_string();
    let body = r#"{"prompt": "The", "max_tokens": 4, "temperature": 0}"#;
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let asking = tokio::task::spawn_blocking({
        let url = url.clone();
        move || ask(&url, &request)
    });
    let response = asking.await.expect("a response");
    assert!(response.starts_with("HTTP/1.1 200"), "{response}");
    assert!(response.contains("\"completion_tokens\":4"), "{response}");
    server.stop().await.expect("a shutdown");
    assert!(TcpStream::connect(url.strip_prefix("http://").expect("an address")).is_err());
}
