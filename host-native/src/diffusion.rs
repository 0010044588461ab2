//! `starling run` with a model that generates by diffusion.

use std::io::{Write, stdout};
use std::time::Instant;

use clap::Args;
use serde_json::json;
use starling::diffusion::{Algorithm, Diffusion, DiffusionError, DiffusionOptions, MAX_STEPS, Schedule};
use starling::engine::Request;
use starling::kernels::Cpu;
use starling::model::{Exec, Model};
use starling::pool::Pool;
use starling::tokenizer::DecodeOptions;
use starling_host::error::Failure;
use starling_host::load::ModelOptions;
use starling_host::pool::ThreadPool;
use starling_host::progress::{Of, Progress, remark};

use crate::cli::RunArgs;

/// Tokens of an answer unless the command says otherwise.
const LENGTH: usize = 128;

/// Options of models that generate by diffusion (Dream, LLaDA, RND1).
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Diffusion")]
pub struct DiffusionArgs {
    /// Steps, each a pass over the whole text, of models that generate by diffusion [default: 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_STEPS as i64))]
    pub diffusion_steps: Option<u32>,
    /// Generate block after block of N tokens (LLaDA) [default: the whole answer at once]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "diffusion_eps")]
    pub diffusion_block_length: Option<u32>,
    /// Time of the last step (Dream), above 0 and below 1 [default: 0.001]
    #[arg(long, value_name = "F")]
    pub diffusion_eps: Option<f32>,
    /// Which tokens are replaced first: origin, entropy, margin, random or confidence, or llama.cpp's number 0 to 4 [default:
    /// confidence]
    #[arg(long, value_name = "NAME", value_parser = algorithm)]
    pub diffusion_algorithm: Option<Algorithm>,
}

fn algorithm(text: &str) -> Result<Algorithm, String> {
    let mut all = Algorithm::ALL.into_iter().enumerate();
    let found = all.find(|(number, algorithm)| text == algorithm.name() || text == number.to_string());
    found.map(|(_, algorithm)| algorithm).ok_or_else(|| {
        format!("found {text:?}, expected {}, or a number from 0 to 4", Algorithm::ALL.map(Algorithm::name).join(", "))
    })
}

impl DiffusionArgs {
    /// The name of an option that is given.
    fn given(&self) -> Option<&'static str> {
        let options = [
            ("--diffusion-steps", self.diffusion_steps.is_some()),
            ("--diffusion-block-length", self.diffusion_block_length.is_some()),
            ("--diffusion-eps", self.diffusion_eps.is_some()),
            ("--diffusion-algorithm", self.diffusion_algorithm.is_some()),
        ];
        options.iter().find(|(_, given)| *given).map(|(name, _)| *name)
    }

    /// Checks that the options given are for the model.
    ///
    /// # Errors
    /// [`Failure::Usage`] names an option that the model does not have.
    pub fn check(&self, model: &Model, args: &RunArgs) -> Result<(), Failure> {
        if model.config.diffusion.is_none() {
            let refuse = |name| {
                let arch = model.config.arch.name;
                Failure::Usage(format!("{name}: the architecture `{arch}` does not generate by diffusion"))
            };
            return self.given().map_or(Ok(()), |name| Err(refuse(name)));
        }
        let others = [
            ("--session", args.session.is_some()),
            ("--receipt", args.receipt.is_some()),
            ("--prediction", args.prediction.is_some()),
            ("--draft-model", args.draft.draft_model.is_some()),
            ("--stop", !args.stop.is_empty()),
            ("--json-schema", args.json_schema.is_some()),
            ("--grammar", args.grammar.is_some()),
            ("--regex", args.regex.is_some()),
        ];
        match others.iter().find(|(_, given)| *given) {
            Some((name, _)) => {
                let why = "the model generates by diffusion, all tokens at once, which this option cannot follow";
                Err(Failure::Usage(format!("{name}: {why}")))
            }
            None => Ok(()),
        }
    }
}

/// What [`generate`] needs beside the request.
pub struct Host<'a> {
    pub model: &'a Model,
    pub model_args: &'a ModelOptions,
    pub args: &'a RunArgs,
    pub cpu: Cpu,
    pub pool: &'a ThreadPool,
    pub n_ctx: usize,
    /// Name of the mode that made the prompt.
    pub mode: &'static str,
    pub load_seconds: f64,
}

/// Generates the answer to a request and prints it.
///
/// # Errors
/// If prompt or options are invalid, memory is short, or output fails.
pub fn generate(host: &Host<'_>, request: Request) -> Result<(), Failure> {
    let (model, args) = (host.model, &host.args.diffusion);
    let left = host.n_ctx.min(model.config.max_context()).saturating_sub(request.tokens.len()).max(1);
    let options = DiffusionOptions {
        length: request.max_tokens.unwrap_or(LENGTH).min(left),
        steps: args.diffusion_steps.map_or(128, |steps| steps as usize),
        schedule: match args.diffusion_block_length {
            Some(length) => Schedule::Blocks { length: length as usize },
            None => Schedule::Timesteps { eps: args.diffusion_eps.unwrap_or(1e-3) },
        },
        algorithm: args.diffusion_algorithm.unwrap_or_default(),
        sampling: request.sampling,
        kv_type: host.model_args.kv_type(),
        n_ctx: host.n_ctx,
    };
    let (seed, is_greedy, n_prompt) =
        (options.sampling.seed, options.sampling.temperature == 0.0, request.tokens.len());
    let start = Instant::now();
    let mut diffusion = Diffusion::new(model, host.pool, &request.tokens, options).map_err(failure)?;
    let n_steps = diffusion.progress().1;
    let progress = match host.args.quiet {
        true => Progress::hidden(),
        false => Progress::on_terminal("generating", Of::Count("steps"), n_steps as u64),
    };
    let exec = Exec { cpu: host.cpu, pool: host.pool };
    let mut done = 0;
    while diffusion.step(exec).map_err(failure)? {
        let now = diffusion.progress().0;
        progress.inc((now - done) as u64, "");
        done = now;
    }
    progress.finish();
    let all = &diffusion.tokens()[n_prompt..];
    let answer = if request.ignore_eos { all } else { diffusion.answer() };
    let text =
        String::from_utf8_lossy(&model.tokenizer.decode(answer, DecodeOptions { skip_special: true })).into_owned();
    let seconds = start.elapsed().as_secs_f64();
    let mut out = stdout().lock();
    if host.args.json {
        let json = json!({
            "text": text,
            "ids": answer,
            "finish_reason": if answer.len() < all.len() { "stop" } else { "length" },
            "mode": host.mode,
            "seed": seed,
            "isa": host.cpu.isa().name(),
            "threads": host.pool.threads(),
            "timings": {
                "load_seconds": host.load_seconds,
                "prompt_tokens": n_prompt,
                "diffusion_steps": n_steps,
                "diffusion_seconds": seconds,
            },
        });
        return Ok(writeln!(out, "{json:#}")?);
    }
    writeln!(out, "{text}")?;
    if !host.args.quiet {
        let seed = if is_greedy { String::new() } else { format!(" | seed {seed}") };
        remark(format_args!(
            "load {:.2} s | prompt {n_prompt} tokens | answer {} tokens, {n_steps} steps in {seconds:.2} s{seed} | {}, {} threads",
            host.load_seconds,
            answer.len(),
            host.cpu.isa(),
            host.pool.threads(),
        ));
    }
    Ok(())
}

fn failure(error: DiffusionError) -> Failure {
    match error {
        DiffusionError::Request(e) => Failure::Request(e),
        DiffusionError::Memory(e) => Failure::memory("the text")(e),
        DiffusionError::NotFinite { .. } => Failure::NotFinite,
        error => Failure::Usage(error.to_string()),
    }
}
