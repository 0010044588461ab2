//! `starling verify`: verifies a receipt by replaying it.

use std::io::{Write, stdout};
use std::path::Path;
use std::time::Instant;

use starling::pool::Pool;
use starling::receipt::{Receipt, VerifyError, verify};
use starling_host::error::Failure;
use starling_host::load;
use starling_host::load::ModelOptions;
use starling_host::progress::remark;

use crate::tokens;

/// # Errors
/// [`Failure::Receipt`] says why the receipt does not verify; or the model does not load.
pub fn run(model_args: &ModelOptions, receipt: &Path, quiet: bool) -> Result<(), Failure> {
    let wrong = |why: String| Failure::Receipt { path: receipt.into(), why };
    let from_stdin = receipt == Path::new("-");
    let text = tokens::text(None, (!from_stdin).then_some(receipt))?;
    let receipt: Receipt = serde_json::from_str(&text).map_err(|e| wrong(format!("not a receipt: {e}")))?;
    let (cpu, pool) = (load::cpu(model_args)?, load::pool(model_args)?);
    let start = Instant::now();
    let model_sha256 = load::sha256(model_args)?;
    let hashed = Instant::now();
    let model = load::model(model_args, &pool)?;
    let loaded = Instant::now();
    // no memory limit: the user chose the receipt
    let result = verify(&model, &model_sha256, cpu, &pool, usize::MAX, &receipt);
    let seconds = loaded.elapsed().as_secs_f64();
    if !quiet {
        remark(format_args!(
            "digest {:.2} s, load {:.2} s | replay of {} + {} tokens {seconds:.3} s | {}, {} threads",
            (hashed - start).as_secs_f64(),
            (loaded - hashed).as_secs_f64(),
            receipt.request.prompt.len(),
            receipt.output.len(),
            cpu.isa(),
            pool.threads(),
        ));
    }
    match result {
        Ok(()) => {}
        Err(VerifyError::Memory(e)) => return Err(Failure::memory("the replay")(e)),
        Err(e) => return Err(wrong(e.to_string())),
    }
    let n = receipt.output.len();
    writeln!(stdout(), "verified: {n} tokens, digest {}", receipt.digest)?;
    Ok(())
}
