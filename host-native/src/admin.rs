//! `starling admin`: client of a server's `/admin` interface.

use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, Uri, header};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Map, Value, json};
use starling_host::error::Failure;
use starling_host::text_file::text_file;
use starling_server::audit::{self, Report};

use crate::cli::{AdminAction, AdminArgs, AuditAction};

/// Maximum size of a response.
const MAX_RESPONSE: usize = 16 << 20;

/// # Errors
/// If there is no key, the server does not respond, or it refuses.
pub fn run(args: &AdminArgs) -> Result<(), Failure> {
    if let AdminAction::Audit { what: AuditAction::Verify { file, audit_key_file, expect } } = &args.action {
        return verify_audit(args, file, audit_key_file.as_deref(), expect.as_deref());
    }
    let key = key(args)?;
    let (method, path, body) = request(&args.action)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let response = runtime.block_on(send(args, &key, method, &path, &body))?;
    if args.json {
        return Ok(writeln!(stdout(), "{response:#}")?);
    }
    let text = match table_of(&args.action) {
        Some((list, columns)) => table(&response[list], columns),
        None => summary(&response),
    };
    Ok(stdout().write_all(text.as_bytes())?)
}

/// Checks an audit log.
fn verify_audit(args: &AdminArgs, file: &Path, key: Option<&Path>, expect: Option<&str>) -> Result<(), Failure> {
    let wrong = |e: &dyn std::fmt::Display| Failure::Usage(e.to_string());
    let key = key.map(audit::Key::read).transpose().map_err(|e| wrong(&e))?;
    let expect = expect.map(str::parse::<audit::Hash>).transpose().map_err(|e| wrong(&format!("--expect: {e}")))?;
    let Report { files, records, first_seq, last_seq, head, torn_bytes } =
        audit::verify(file, key.as_ref(), expect).map_err(|problem| wrong(&problem))?;
    // the logs beside it have chains of their own
    let other = |path: PathBuf| audit::verify(&path, key.as_ref(), None).map(|report| (path, report));
    let others = audit::others(file).into_iter().map(other).collect::<Result<Vec<_>, _>>();
    let others = others.map_err(|problem| wrong(&problem))?;
    let mut out = stdout().lock();
    if args.json {
        let report = json!({
            "others": others.iter().map(|(path, report)| json!({
                "file": path, "records": report.records, "head": report.head.to_string(),
            })).collect::<Vec<_>>(),
            "files": files, "records": records, "first_seq": first_seq, "last_seq": last_seq,
            "head": head.to_string(), "torn_bytes": torn_bytes,
        });
        return Ok(writeln!(out, "{report:#}")?);
    }
    writeln!(out, "{}: {records} records in {files} files, {first_seq} to {last_seq}: ok", file.display())?;
    if first_seq > 1 {
        writeln!(out, "records before {first_seq} are gone: old files were removed")?;
    }
    if torn_bytes > 0 {
        writeln!(out, "{torn_bytes} bytes of an incomplete line at the end")?;
    }
    writeln!(out, "last hash: {head}")?;
    for (path, report) in others {
        let Report { files, records, first_seq, last_seq, .. } = report;
        writeln!(out, "{}: {records} records in {files} files, {first_seq} to {last_seq}: ok", path.display())?;
    }
    Ok(())
}

fn key(args: &AdminArgs) -> Result<String, Failure> {
    if let Some(path) = &args.key_file {
        let text = text_file(path)?;
        let keys = text.lines().filter_map(|line| line.split_whitespace().next());
        let first = keys.into_iter().find(|key| !key.starts_with('#')).map(str::to_string);
        return first.ok_or_else(|| Failure::Usage(format!("{}: found no key", path.display())));
    }
    let missing = || Failure::Usage("expected the key of an administrator: --key-file or STARLING_ADMIN_KEY".into());
    std::env::var("STARLING_ADMIN_KEY").ok().filter(|key| !key.is_empty()).ok_or_else(missing)
}

/// Method, path and body of an action.
fn request(action: &AdminAction) -> Result<(Method, String, Value), Failure> {
    use AdminAction as A;
    let model = |name: &str| format!("models/{}", escaped(name));
    let none = || json!({});
    Ok(match action {
        A::Audit { .. } => (Method::GET, "audit".into(), none()),
        A::Models => (Method::GET, "models".into(), none()),
        A::Add { name, source, settings } => {
            let body = json!({ "name": name, "source": source, "settings": pairs(settings)?, "load": true });
            (Method::POST, "models".into(), body)
        }
        A::Remove { name } => (Method::DELETE, model(name), none()),
        A::Load { name } => (Method::POST, model(name) + "/load", none()),
        A::Unload { name, now } => (Method::POST, model(name) + "/unload", json!({ "now": now })),
        A::Swap { name, source, drain, test_prompt, expect, no_wait } => {
            let mut body = json!({ "strategy": if *drain { "drain" } else { "parallel" }, "wait": !no_wait });
            if let Some(source) = source {
                body["source"] = json!(source);
            }
            if test_prompt.is_some() {
                body["test"] = json!({ "prompt": test_prompt, "expect": expect });
            }
            (Method::POST, model(name) + "/swap", body)
        }
        A::Workers { name } => (Method::GET, model(name) + "/workers", none()),
        A::AddWorker { name } => (Method::POST, model(name) + "/workers", none()),
        A::DrainWorker { name, id } => (Method::DELETE, format!("{}/workers/{id}", model(name)), none()),
        A::Drain => (Method::POST, "drain".into(), none()),
        A::Undrain => (Method::POST, "undrain".into(), none()),
        A::Reload => (Method::POST, "reload".into(), none()),
        A::Config => (Method::GET, "config".into(), none()),
        A::Set { of: None, settings } => (Method::PATCH, "config".into(), pairs(settings)?),
        A::Set { of: Some(name), settings } => {
            (Method::PATCH, "config".into(), json!({ "models": { (name): pairs(settings)? } }))
        }
        A::Caches => (Method::GET, "caches".into(), none()),
        A::Invalidate { name } => (Method::POST, "caches/invalidate".into(), json!({ "model": name })),
        A::Failures => (Method::GET, "failures".into(), none()),
    })
}

/// Settings as an object; the server reads their values as it reads flags.
fn pairs(settings: &[String]) -> Result<Value, Failure> {
    let pair = |text: &String| {
        let (key, value) = text
            .split_once('=')
            .ok_or_else(|| Failure::Usage(format!("found {text:?}, expected KEY=VALUE such as queue-high=300")))?;
        Ok((key.to_string(), json!(value)))
    };
    settings.iter().map(pair).collect::<Result<Map<_, _>, Failure>>().map(Value::Object)
}

/// A model name in a path.
fn escaped(name: &str) -> String {
    let escape = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'@' | b':' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    name.bytes().map(escape).collect()
}

async fn send(args: &AdminArgs, key: &str, method: Method, path: &str, body: &Value) -> Result<Value, Failure> {
    let url = format!("{}/admin/{path}", args.url.trim_end_matches('/'));
    let wrong = |e: &dyn std::fmt::Display| Failure::Usage(format!("{url}: {e}"));
    let uri: Uri = url.parse().map_err(|e| wrong(&e))?;
    let request = Request::builder()
        .method(method)
        .uri(uri)
        .header(header::AUTHORIZATION, format!("Bearer {key}"))
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body.to_string())))
        .map_err(|e| wrong(&e))?;
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let unreachable = |e: &dyn std::fmt::Display| Failure::Io(std::io::Error::other(format!("{url}: {e}")));
    let response = client.request(request).await.map_err(|e| unreachable(&e))?;
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_RESPONSE).collect().await.map_err(|e| unreachable(&e))?;
    let value: Value = serde_json::from_slice(&body.to_bytes()).unwrap_or_default();
    if status.is_success() {
        return Ok(value);
    }
    let message = value["error"]["message"].as_str().unwrap_or("no message");
    Err(Failure::Usage(format!("{url}: status {}: {message}", status.as_u16())))
}

/// The list in the response of an action, and the columns to print.
fn table_of(action: &AdminAction) -> Option<(&'static str, &'static [&'static str])> {
    match action {
        AdminAction::Models => {
            Some(("models", &["name", "status", "source", "running", "waiting", "weight_bytes", "kv_bytes", "pinned"]))
        }
        AdminAction::Workers { .. } => {
            Some(("workers", &["id", "state", "running", "kv_bytes", "kv_in_use_bytes", "kv_cached_bytes"]))
        }
        AdminAction::Config => Some(("settings", &["key", "value", "origin", "live"])),
        AdminAction::Caches => Some((
            "caches",
            &["model", "kv_bytes", "in_use_bytes", "cached_bytes", "page_hits", "page_misses", "sessions"],
        )),
        AdminAction::Failures => Some(("failures", &["time", "request_id", "model", "worker", "tokens", "fault"])),
        _ => None,
    }
}

/// A table with aligned columns. Sizes in bytes have units.
fn table(rows: &Value, columns: &[&str]) -> String {
    let cell = |row: &Value, column: &&str| text(column, &row[*column]);
    let head =
        columns.iter().map(|column| column.trim_end_matches("_bytes").replace('_', " ").to_uppercase()).collect();
    let mut lines: Vec<Vec<String>> = vec![head];
    let rows = rows.as_array().map_or(&[][..], Vec::as_slice);
    lines.extend(rows.iter().map(|row| columns.iter().map(|column| cell(row, column)).collect()));
    let width = |i: usize| lines.iter().map(|line| line[i].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let mut out = String::new();
    for line in &lines {
        let cells: Vec<String> = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        out += cells.join("  ").trim_end();
        out.push('\n');
    }
    out
}

fn text(key: &str, value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::String(text) => text.clone(),
        Value::Number(n) if key.ends_with("bytes") => bytesize::ByteSize(n.as_u64().unwrap_or(0)).to_string(),
        Value::Bool(true) => "yes".into(),
        Value::Bool(false) => "no".into(),
        other => other.to_string(),
    }
}

/// One line for each field with a plain value.
fn summary(response: &Value) -> String {
    let fields = response.as_object().into_iter().flatten();
    let plain = fields
        .filter(|(_, value)| !value.is_object() && !matches!(value, Value::Array(a) if a.iter().any(Value::is_object)));
    plain
        .map(|(key, value)| format!("{}: {}\n", key.trim_end_matches("_bytes").replace('_', " "), text(key, value)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_aligned_and_sizes_have_units() {
        let rows = json!([{ "name": "a", "kv_bytes": 2097152, "pinned": true }, { "name": "longer", "pinned": false }]);
        let expected = "NAME    KV       PINNED\na       2.0 MiB  yes\nlonger  -        no\n";
        assert_eq!(table(&rows, &["name", "kv_bytes", "pinned"]), expected);
    }

    #[test]
    fn names_and_settings_reach_the_server_as_they_are() {
        assert_eq!(escaped("a/b c@2"), "a%2Fb%20c@2");
        let (method, path, body) =
            request(&AdminAction::Set { of: Some("m".into()), settings: vec!["max-n=3".into()] }).unwrap();
        assert_eq!((method, &*path, body), (Method::PATCH, "config", json!({ "models": { "m": { "max-n": "3" } } })));
        assert!(pairs(&["max-n".into()]).is_err());
    }
}
