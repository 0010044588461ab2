//! Measures the module with plain exports in wasmtime: `module-bench MODULE MODEL ISA` reads lines `PREFILL DECODE
//! SEED` and answers each with its tokens per second. `tests/bench/wasm_vs_native.mjs` asks.

use std::time::Instant;

use serde_json::json;
use wasi_run::{Starling, engine};
use wasmtime::{Module, Result, bail};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [module, model, isa] = &args[..] else { bail!("usage: module-bench MODULE MODEL ISA") };
    let engine = engine()?;
    let mut m = Starling::new(&engine, &Module::from_file(&engine, module)?)?;
    let options = json!({ "n_ctx": 1024, "batch_tokens": 512, "isa": isa }).to_string();
    let session = m.open(&std::fs::read(model)?, 1 << 20, &options).expect("a session");
    let n_vocab = m.call("starling_info", session).expect("info")["n_vocab"].as_u64().expect("a size");
    for line in std::io::stdin().lines() {
        let numbers: Vec<u64> = line?.split(' ').map(|n| n.parse().expect("a number")).collect();
        let [prefill, decode, seed] = numbers[..] else { bail!("expected three numbers") };
        let ids: Vec<u64> = (0..prefill).map(|i| (i * 7919 + 13 + seed * 104_729) % n_vocab).collect();
        let request = json!({
            "ids": ids,
            "max_tokens": decode.max(1),
            "ignore_eos": true,
            "sampling": { "temperature": 0 },
        });
        m.call_with("starling_submit", session, request.to_string().as_bytes()).expect("an id");
        let start = Instant::now();
        m.call("starling_step", session).expect("a step");
        let first = start.elapsed().as_secs_f64();
        let mut steps = 0;
        while m.call("starling_step", session).expect("a step")["tokens"] != json!(0) {
            steps += 1;
        }
        let rest = start.elapsed().as_secs_f64() - first;
        println!("{}", if decode == 0 { prefill as f64 / first } else { f64::from(steps) / rest });
    }
    Ok(())
}
