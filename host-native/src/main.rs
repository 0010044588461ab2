//! The `starling` command: language models on this machine's CPU, the same bytes as everywhere.

#![allow(unreachable_pub)] // a binary has no outside

mod bench;
mod chat;
mod cli;
mod error;
mod load;
mod model_file;
mod pool;
mod run;
mod sampling;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};
use error::Failure;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            failure.exit_code()
        }
    }
}

fn run(cli: &Cli) -> Result<(), Failure> {
    match &cli.command {
        Command::Run(args) => run::run(&cli.model, args),
        Command::Bench(args) => bench::run(&cli.model, args),
    }
}
