//! `starling bench serve --find-workers`: the number of workers with which a model serves most on this machine.

use std::io::{BufRead, BufReader, Write, stdout};
use std::process::{Child, Command, Stdio};

use clap::ValueEnum;
use serde::Serialize;
use starling_host::error::Failure;
use starling_host::pool::default_threads;

use crate::bench_serve::{self, Report};
use crate::cli::{BenchOutput, BenchServeArgs, ModelArgs};

/// A server of this machine, ended on drop.
struct LocalServer {
    child: Child,
    url: String,
}

/// What a number of workers reaches.
#[derive(Debug, Serialize)]
struct Row {
    workers: usize,
    /// Compute threads of each worker.
    threads: usize,
    report: Report,
}

/// Starts a server for each number of workers that divides the threads, sends the same requests to each, and prints what
/// each reaches.
///
/// # Errors
/// If a server does not start, or every request to one fails.
pub fn run(args: &BenchServeArgs, model: &ModelArgs) -> Result<(), Failure> {
    let threads = model.threads.map_or_else(default_threads, usize::from);
    let mut rows = Vec::new();
    for workers in (1..=threads).filter(|n| threads.is_multiple_of(*n)) {
        let server = LocalServer::start(model, threads, workers)?;
        let args = BenchServeArgs { url: server.url.clone(), server_model: None, api_key: None, ..args.clone() };
        rows.push(Row { workers, threads: threads / workers, report: bench_serve::measure(&args)? });
    }
    let mut out = stdout().lock();
    if args.output == BenchOutput::Json {
        let json = serde_json::to_string_pretty(&rows).map_err(std::io::Error::other)?;
        return Ok(writeln!(out, "{json}")?);
    }
    writeln!(
        out,
        "| workers | threads of each | tokens/s | time to first token p50, p99, ms | time per token p50, p99, ms | in time |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|")?;
    for Row { workers, threads, report } in &rows {
        let (first, each) = (&report.time_to_first_token, &report.time_per_output_token);
        let rate = report.output_tokens_per_second;
        let times = format!("{:.0}, {:.0} | {:.1}, {:.1}", first.p50, first.p99, each.p50, each.p99);
        writeln!(out, "| {workers} | {threads} | {rate:.1} | {times} | {:.2}/s |", report.goodput)?;
    }
    let best = rows.iter().max_by(|a, b| {
        let by_rate = a.report.output_tokens_per_second.total_cmp(&b.report.output_tokens_per_second);
        a.report.goodput.total_cmp(&b.report.goodput).then(by_rate)
    });
    if let Some(best) = best {
        writeln!(out, "\nmost requests in time, then most tokens/s: --workers {}", best.workers)?;
    }
    Ok(())
}

impl LocalServer {
    fn start(model: &ModelArgs, threads: usize, workers: usize) -> Result<LocalServer, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["serve", "--port", "0", "--log-level", "error"]);
        command.args(["--workers", &workers.to_string(), "--threads", &threads.to_string()]);
        for source in &model.sources {
            command.arg("--model").arg(source);
        }
        if let Some(isa) = &model.isa {
            command.args(["--isa", isa]);
        }
        if let Some(kv_type) = model.kv_type.and_then(|kv_type| kv_type.to_possible_value()) {
            command.args(["--kv-type", kv_type.get_name()]);
        }
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let output = child.stdout.take();
        let mut server = LocalServer { child, url: String::new() };
        if let Some(output) = output {
            BufReader::new(output).read_line(&mut server.url)?;
        }
        server.url.truncate(server.url.trim_end().len());
        if server.url.is_empty() {
            return Err(Failure::Usage(format!("the server with {workers} workers did not start")));
        }
        Ok(server)
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
