//! `starling serve`: the settings as flags.

use std::io::{Write, stdout};
use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Args, FromArgMatches};
use starling_host::error::Failure;
use starling_server::config::{ServeOptions, Settings, TABLE};

use crate::cli::ModelArgs;

/// Headings of `--help`, each with the first setting under it.
const GROUPS: [(&str, &str); 12] = [
    ("host", "Server"),
    ("model-name", "Models"),
    ("admin-key-file", "Administration"),
    ("chat-template", "Models"),
    ("ctx-size", "Performance"),
    ("temperature", "Sampling defaults"),
    ("queue-high", "Queue and limits"),
    ("session-ttl", "Sessions and caches"),
    ("refuse-unknown-fields", "Requests and connections"),
    ("api-key", "Keys, TLS and signatures"),
    ("kv-disk", "Files"),
    ("worker-id", "Operation"),
];
/// Letters of settings.
const SHORTS: [(&str, char); 2] = [("ctx-size", 'c'), ("seed", 's')];
/// Names of settings in llama-server and in the other commands.
const ALIASES: [(&str, &str); 8] = [
    ("temperature", "temp"),
    ("model-name", "alias"),
    ("max-seqs", "parallel"),
    ("batch-tokens", "batch-size"),
    ("repetition-penalty", "repeat-penalty"),
    ("max-tokens", "n-predict"),
    ("tls-cert", "ssl-cert-file"),
    ("tls-key", "ssl-key-file"),
];

/// Flags of `serve` besides those of all commands.
#[derive(Debug, Clone, Default)]
pub struct ServeArgs {
    /// Models given as arguments, as `--model` takes them.
    pub models: Vec<PathBuf>,
    /// Settings given as flags.
    pub flags: Vec<(&'static str, String)>,
    pub config: Option<PathBuf>,
    pub print_config: bool,
}

impl FromArgMatches for ServeArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut args = ServeArgs::default();
        args.update_from_arg_matches(matches)?;
        Ok(args)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        let text = |key: &'static str| Some((key, matches.get_one::<String>(key)?.clone()));
        self.flags = TABLE.iter().filter_map(|setting| text(setting.key)).collect();
        self.models = matches.get_many::<PathBuf>("models").into_iter().flatten().cloned().collect();
        self.config = matches.get_one::<PathBuf>("config").cloned();
        self.print_config = matches.get_flag("print-config");
        Ok(())
    }
}

impl Args for ServeArgs {
    fn augment_args(mut command: clap::Command) -> clap::Command {
        let file = Arg::new("config").long("config").value_name("FILE").env("STARLING_CONFIG");
        let file = file.value_parser(clap::value_parser!(PathBuf)).help("Settings file: TOML, YAML or JSON");
        let print = Arg::new("print-config").long("print-config").action(ArgAction::SetTrue);
        let models = Arg::new("models").value_name("MODEL").num_args(0..).value_parser(clap::value_parser!(PathBuf));
        command = command.arg(models.help("Models to serve, as --model takes them: [NAME=]SOURCE"));
        command = command.arg(file).arg(print.help("Print the settings in effect as a TOML file and exit"));
        let (defaults, mut group) = (Settings::default(), "");
        for setting in TABLE {
            let default = (setting.get)(&defaults).map_or_else(String::new, |value| format!(" [default: {value}]"));
            let help = format!("{}{default}", setting.help);
            let mut arg = Arg::new(setting.key).long(setting.key).value_name(setting.value_name).help(help);
            if setting.value_name == "BOOL" {
                arg = arg.num_args(0..=1).default_missing_value("true").require_equals(true);
            }
            if let Some((_, heading)) = GROUPS.iter().find(|(first, _)| *first == setting.key) {
                group = heading;
            }
            if let Some((_, short)) = SHORTS.iter().find(|(key, _)| *key == setting.key) {
                arg = arg.short(*short);
            }
            let others = ALIASES.iter().filter(|(key, _)| *key == setting.key).map(|(_, alias)| *alias);
            command = command.arg(arg.aliases(others).help_heading(group));
        }
        let models = "Each setting is also a key of the file of --config (queue-high) and an environment variable \
                      (STARLING_QUEUE_HIGH). A flag overrides the environment, and both override the file.\n\n\
                      Several models: repeat --model NAME=SOURCE, or give [models.NAME] tables in the file with \
                      `source` and any setting of a model; they override what all models have.";
        command.after_help(models)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

/// # Errors
/// If a setting is invalid, the model does not load, the address is in use, the engine panics, or the shutdown ends
/// running requests.
pub fn run(model: &ModelArgs, args: &ServeArgs) -> Result<(), Failure> {
    let ServeArgs { flags, config, .. } = args.clone();
    let options = ServeOptions { models: model.sources.clone(), model: model.options(), flags, config };
    if args.print_config {
        let configuration = options.configuration()?;
        return Ok(stdout().write_all(configuration.settings.to_toml(&configuration.origins).as_bytes())?);
    }
    starling_server::run(options)
}
