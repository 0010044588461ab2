//! The `starling` command.

#![deny(unsafe_code)]
#![allow(unreachable_pub)] // a binary has no outside

mod admin;
mod bandwidth;
mod bench;
mod bench_serve;
mod bench_workers;
mod chat;
mod cli;
mod diffusion;
mod embed;
mod exit;
mod health;
mod help;
mod imatrix;
mod inspect;
mod interrupt;
mod list;
mod logits;
mod positional;
mod pull;
mod quantize;
mod rm;
mod run;
mod sampling;
mod serve;
mod show;
mod stored;
mod tips;
mod tokens;
mod verify;

use std::io::{Write, stderr, stdout};
use std::process::ExitCode;

use clap::builder::Resettable;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command as Interface, CommandFactory, FromArgMatches};
use starling_host::error::Failure;

use cli::{Cli, Command};
use exit::exit_code;

/// glibc's allocator keeps most of the memory of a model that was unloaded.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Adapts clap's commands: negative numbers reach the value parsers, which explain the range; empty environment variables
/// count as unset.
fn interface(command: Interface) -> Interface {
    let is_empty = |arg: &Arg| arg.get_env().and_then(std::env::var_os).is_some_and(|value| value.is_empty());
    let argument = |arg: Arg| {
        let arg = if is_empty(&arg) { arg.env(Resettable::Reset) } else { arg };
        let has_value = arg.get_action().takes_values();
        if has_value { arg.allow_negative_numbers(true) } else { arg }
    };
    command.mut_args(argument).mut_subcommands(interface)
}

fn main() -> ExitCode {
    let done = match command_line() {
        Ok(cli) => run(&cli).map(|()| ExitCode::SUCCESS),
        Err(said) => match said.print() {
            // --help that cannot be printed is an I/O error; a usage error keeps its exit code
            Err(e) if !said.use_stderr() => Err(e.into()),
            _ => Ok(ExitCode::from(said.exit_code() as u8)),
        },
    };
    match done.and_then(|code| Ok(stdout().flush().map(|()| code)?)) {
        Ok(code) => code,
        Err(failure) if failure.is_closed_pipe() => ExitCode::SUCCESS,
        // the user knows
        Err(failure @ Failure::Interrupted) => exit_code(&failure),
        Err(failure) => {
            // stderr may be closed; the exit code remains
            let _ = writeln!(stderr(), "error: {failure}");
            exit_code(&failure)
        }
    }
}

/// Parses the command line. The error may be the text of `--help`.
fn command_line() -> Result<Cli, clap::Error> {
    let arguments: Vec<_> = std::env::args_os().collect();
    let mut command = help::describe(interface(Cli::command()));
    if let Some(tip) = tips::tip(&arguments, None) {
        return Err(tips::unknown(tip));
    }
    let matches = command.try_get_matches_from_mut(&arguments);
    let matches = matches.map_err(|e| tips::improved(e, &arguments, &mut command))?;
    let mut cli = Cli::from_arg_matches(&matches)?;
    let of_command = matches.subcommand().map(|(_, arguments)| arguments);
    let is_given = |matches: &ArgMatches| {
        matches.try_contains_id("model").is_ok() && matches.value_source("model") == Some(ValueSource::CommandLine)
    };
    let is_named = is_given(&matches) || of_command.is_some_and(is_given);
    let arranged = positional::arrange(&mut cli, is_named);
    arranged.map_err(|e| clap::Error::raw(ErrorKind::ArgumentConflict, format!("{e}\n")))?;
    Ok(cli)
}

fn run(cli: &Cli) -> Result<(), Failure> {
    let model = || cli.model.resolve();
    // the others have handlers of their own
    let is_chat = match &cli.command {
        Command::Run(args) => !cli.model.sources.is_empty() && args.is_interactive(),
        command => matches!(command, Command::Chat(_) | Command::Serve(_)),
    };
    if !is_chat {
        interrupt::exit_on_interrupt()?;
    }
    match &cli.command {
        // as `ollama run MODEL`
        Command::Run(args) if !cli.model.sources.is_empty() && args.is_interactive() => {
            chat::run(&model()?, &args.as_chat())
        }
        Command::Run(args) => run::run(&model()?, args),
        Command::Serve(args) => serve::run(&cli.model, args),
        Command::Chat(args) => chat::run(&model()?, args),
        Command::Inspect(args) => inspect::run(&model()?, args),
        Command::Tokenize(args) => tokens::tokenize(&model()?, args),
        Command::Detokenize(args) => tokens::detokenize(&model()?, args),
        Command::Logits(args) => logits::logits(&model()?, args),
        Command::Perplexity(args) => logits::perplexity(&model()?, args),
        Command::Quantize(args) => quantize::run(&cli.model.options(), args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "starling", &mut script);
            Ok(stdout().write_all(&script)?)
        }
        Command::Man { directory } => help::man_pages(help::describe(Cli::command()), directory),
        Command::Embed(args) => embed::run(&model()?, args),
        Command::Bench(args) => match &args.what {
            None => bench::run(&model()?, args),
            Some(cli::BenchWhat::Serve(args)) if args.find_workers => bench_workers::run(args, &cli.model),
            Some(cli::BenchWhat::Serve(args)) => bench_serve::run(args),
        },
        Command::Pull(args) => pull::run(args),
        Command::List(args) => list::run(args),
        Command::Show(args) => show::run(args),
        Command::Rm(args) => rm::run(args),
        Command::Health(args) => health::run(args),
        Command::Admin(args) => admin::run(args),
        Command::Verify(args) => match &args.receipt {
            None => stored::verify(&[]),
            Some(path) => match path.to_str().filter(|name| !path.exists() && stored::is_stored(name)) {
                Some(name) => stored::verify(&[name.to_string()]),
                None => verify::run(&model()?, path, args.quiet),
            },
        },
    }
}
