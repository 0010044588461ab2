//! `starling bench serve`: load test of an OpenAI-compatible server.
//!
//! Requests are completions of random tokens. They arrive by a Poisson process (`--rate`), or a fixed number of clients sends
//! them back to back (`--concurrency`). The seed determines prompts and arrival times.

use std::io::{Write, stdout};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Method, Request, header};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Serialize;
use serde_json::{Value, json};
use starling_host::error::Failure;
use tokio::sync::Semaphore;

use crate::cli::{BenchOutput, BenchServeArgs};

type Http = Client<HttpConnector, Full<Bytes>>;

/// Outcome of a request.
#[derive(Debug, Clone, Default)]
struct Seen {
    /// Seconds from sending the request to each chunk.
    pieces: Vec<f64>,
    /// Seconds from sending the request to the last byte.
    end: f64,
    /// Completion tokens, as the server counts them.
    tokens: usize,
    error: Option<String>,
}

/// Summary of all requests. Times are in milliseconds.
#[derive(Debug, Serialize)]
pub struct Report {
    requests: usize,
    failed: usize,
    seconds: f64,
    requests_per_second: f64,
    output_tokens: usize,
    pub output_tokens_per_second: f64,
    /// Requests per second that met both SLOs.
    pub goodput: f64,
    pub time_to_first_token: Times,
    pub time_per_output_token: Times,
    inter_token_latency: Times,
    request_latency: Times,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_error: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct Times {
    mean: f64,
    pub p50: f64,
    p90: f64,
    pub p99: f64,
    max: f64,
}

/// # Errors
/// If the server cannot be reached, or every request fails.
pub fn run(args: &BenchServeArgs) -> Result<(), Failure> {
    print(&measure(args)?, args)
}

/// Sends the requests, and sums up what came back.
///
/// # Errors
/// If the server cannot be reached, or every request fails.
pub fn measure(args: &BenchServeArgs) -> Result<Report, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let report = runtime.block_on(load(args))?;
    match report.first_error {
        Some(e) if report.failed == report.requests => Err(Failure::Io(std::io::Error::other(e))),
        _ => Ok(report),
    }
}

async fn load(args: &BenchServeArgs) -> Result<Report, Failure> {
    let http: Http = Client::builder(TokioExecutor::new()).build_http();
    let base = Arc::<str>::from(args.url.trim_end_matches('/'));
    let model = match &args.server_model {
        Some(name) => name.clone(),
        None => model(&http, &base).await.map_err(|e| Failure::Usage(format!("{base}: {e}")))?,
    };
    let mut draws = Draws(args.seed);
    let door = Arc::new(Semaphore::new(if args.rate.is_some() { args.requests } else { args.concurrency }));
    let start = Instant::now();
    let mut due = start;
    let mut tasks = Vec::with_capacity(args.requests);
    for i in 0..args.requests {
        let tokens: Vec<u64> = (0..args.prompt).map(|_| args.first_id + draws.next() % args.ids.max(1)).collect();
        let body = json!({
            "model": model, "prompt": tokens, "max_tokens": args.generate, "stream": true, "ignore_eos": true,
            "stream_options": { "include_usage": true }, "seed": i, "temperature": args.temperature,
        });
        if let Some(rate) = args.rate {
            // times between arrivals of a Poisson process are exponential
            due += Duration::from_secs_f64(-(1.0 - draws.unit()).ln() / rate);
            tokio::time::sleep_until(due.into()).await;
        }
        let Ok(turn) = Arc::clone(&door).acquire_owned().await else { break };
        let (http, base, key) = (http.clone(), Arc::clone(&base), args.api_key.clone());
        tasks.push(tokio::spawn(async move {
            let seen = ask(&http, &base, key.as_deref(), body).await;
            drop(turn);
            seen
        }));
    }
    let mut all = Vec::with_capacity(tasks.len());
    for task in tasks {
        all.push(task.await.unwrap_or_else(|e| Seen { error: Some(e.to_string()), ..Seen::default() }));
    }
    Ok(report(&all, start.elapsed().as_secs_f64(), args)?)
}

/// The first model in `/v1/models`.
async fn model(http: &Http, base: &str) -> Result<String, String> {
    let uri = format!("{base}/v1/models").parse().map_err(|e| format!("{e}"))?;
    let response = http.get(uri).await.map_err(|e| e.to_string())?;
    let body = response.into_body().collect().await.map_err(|e| e.to_string())?.to_bytes();
    let value: Value = serde_json::from_slice(&body).map_err(|e| e.to_string())?;
    value["data"][0]["id"].as_str().map(Into::into).ok_or_else(|| "no model in /v1/models".into())
}

async fn ask(http: &Http, base: &str, key: Option<&str>, body: Value) -> Seen {
    let mut seen = Seen::default();
    let start = Instant::now();
    if let Err(e) = stream(http, base, key, body, start, &mut seen).await {
        seen.error = Some(e);
    }
    seen.end = start.elapsed().as_secs_f64();
    seen
}

async fn stream(
    http: &Http,
    base: &str,
    key: Option<&str>,
    body: Value,
    start: Instant,
    seen: &mut Seen,
) -> Result<(), String> {
    let mut request = Request::builder().method(Method::POST).uri(format!("{base}/v1/completions"));
    request = request.header(header::CONTENT_TYPE, "application/json");
    if let Some(key) = key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let request = request.body(Full::new(Bytes::from(body.to_string()))).map_err(|e| e.to_string())?;
    let response = http.request(request).await.map_err(|e| e.to_string())?;
    let status = response.status();
    let mut body = response.into_body();
    if !status.is_success() {
        let text = body.collect().await.map_err(|e| e.to_string())?.to_bytes();
        return Err(format!("status {status}: {}", String::from_utf8_lossy(&text)));
    }
    let mut buffer = Vec::new();
    let mut pieces = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| e.to_string())?;
        let now = start.elapsed().as_secs_f64();
        buffer.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
        while let Some(end) = buffer.windows(2).position(|pair| pair == b"\n\n") {
            let event: Vec<u8> = buffer.drain(..end + 2).collect();
            let Some(data) = event.strip_prefix(b"data: ").filter(|data| !data.starts_with(b"[DONE]")) else {
                continue;
            };
            let value: Value = serde_json::from_slice(data).map_err(|e| e.to_string())?;
            if let Some(message) = value["error"]["message"].as_str() {
                return Err(message.into());
            }
            if value["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()) {
                seen.pieces.push(now);
                pieces += 1;
            }
            if let Some(n) = value["usage"]["completion_tokens"].as_u64() {
                seen.tokens = n as usize;
            }
        }
    }
    seen.tokens = seen.tokens.max(pieces);
    Ok(())
}

fn report(all: &[Seen], seconds: f64, args: &BenchServeArgs) -> std::io::Result<Report> {
    let good: Vec<&Seen> = all.iter().filter(|seen| seen.error.is_none()).collect();
    let first = |seen: &Seen| seen.pieces.first().copied().unwrap_or(seen.end);
    let per_token = |seen: &Seen| (seen.end - first(seen)) / seen.tokens.saturating_sub(1).max(1) as f64;
    let in_time =
        good.iter().filter(|seen| first(seen) * 1000.0 <= args.slo_ttft && per_token(seen) * 1000.0 <= args.slo_tpot);
    let output_tokens = good.iter().map(|seen| seen.tokens).sum();
    Ok(Report {
        requests: all.len(),
        failed: all.len() - good.len(),
        seconds,
        requests_per_second: good.len() as f64 / seconds,
        output_tokens,
        output_tokens_per_second: output_tokens as f64 / seconds,
        goodput: in_time.count() as f64 / seconds,
        time_to_first_token: times(good.iter().map(|seen| first(seen)))?,
        time_per_output_token: times(good.iter().map(|seen| per_token(seen)))?,
        inter_token_latency: times(good.iter().flat_map(|seen| seen.pieces.windows(2).map(|w| w[1] - w[0])))?,
        request_latency: times(good.iter().map(|seen| seen.end))?,
        first_error: all.iter().find_map(|seen| seen.error.clone()),
    })
}

/// Mean and percentiles to three significant digits.
fn times(seconds: impl Iterator<Item = f64>) -> std::io::Result<Times> {
    let mut micros = Histogram::<u64>::new(3).map_err(std::io::Error::other)?;
    for s in seconds {
        micros.record((s * 1e6) as u64).map_err(std::io::Error::other)?;
    }
    let at = |quantile| micros.value_at_quantile(quantile) as f64 / 1e3;
    Ok(Times { mean: micros.mean() / 1e3, p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) })
}

fn print(report: &Report, args: &BenchServeArgs) -> Result<(), Failure> {
    let mut out = stdout().lock();
    if args.output == BenchOutput::Json {
        let json = serde_json::to_string_pretty(report).map_err(std::io::Error::other)?;
        return Ok(writeln!(out, "{json}")?);
    }
    let Report { requests, failed, seconds, output_tokens, .. } = report;
    writeln!(out, "{requests} requests, {failed} failed, {output_tokens} tokens in {seconds:.2} s")?;
    writeln!(
        out,
        "{:.1} tokens/s, {:.2} requests/s, {:.2} of them in time",
        report.output_tokens_per_second, report.requests_per_second, report.goodput
    )?;
    writeln!(out, "\n| ms | mean | p50 | p90 | p99 | max |\n|---|---|---|---|---|---|")?;
    for (name, t) in [
        ("time to first token", &report.time_to_first_token),
        ("time per output token", &report.time_per_output_token),
        ("inter-token latency", &report.inter_token_latency),
        ("request", &report.request_latency),
    ] {
        writeln!(out, "| {name} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} |", t.mean, t.p50, t.p90, t.p99, t.max)?;
    }
    if let Some(e) = &report.first_error {
        writeln!(out, "\nfirst error: {e}")?;
    }
    Ok(())
}

/// Pseudo-random numbers (Steele, Lea and Flood 2014, SplitMix64).
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_times() {
        let t = times((1..=100).map(|n| f64::from(n) / 1000.0)).unwrap();
        // within the histogram's three significant digits
        for (found, expected) in [(t.p50, 50.0), (t.p90, 90.0), (t.p99, 99.0), (t.max, 100.0), (t.mean, 50.5)] {
            assert!((found - expected).abs() <= expected * 1e-3, "{t:?}");
        }
        assert_eq!(times(std::iter::empty()).unwrap().max, 0.0);
    }
}
