//! What `--help` shows beside the doc comments of [`crate::cli`]: examples, and the options that a command uses.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use clap::{Arg, Command};
use starling_host::error::Failure;

/// Examples of each command, before its usage.
const EXAMPLES: [(&str, &str); 20] = [
    (
        "run",
        "  starling run \"Once upon a time\"                       continue a text with the bundled model\n  \
         starling run qwen.gguf \"What is an apple?\"            ask a model\n  \
         starling run qwen.gguf --file notes.txt -n 200        at most 200 tokens\n  \
         cat notes.txt | starling run qwen.gguf --raw          continue a text from a pipe",
    ),
    (
        "chat",
        "  starling chat qwen.gguf\n  \
         starling chat hf:OWNER/REPO:Q4_K_M --system \"Answer in one sentence.\"",
    ),
    (
        "serve",
        "  starling serve qwen.gguf                              chat page and API at http://127.0.0.1:8080\n  \
         starling serve chat=qwen.gguf small=gemma.gguf        two models\n  \
         STARLING_API_KEY=… starling serve qwen.gguf --host 0.0.0.0",
    ),
    (
        "embed",
        "  starling embed embedding.gguf \"a text\" \"another\"\n  \
         starling embed -m embedding.gguf --file lines.txt --output npy --to vectors.npy",
    ),
    ("bench", "  starling bench qwen.gguf -p 512 -n 64\n  starling bench serve --url http://127.0.0.1:8080"),
    ("inspect", "  starling inspect qwen.gguf\n  starling inspect qwen.gguf --json"),
    ("tokenize", "  starling tokenize qwen.gguf \"a text\"\n  starling tokenize \"a text\" --json"),
    ("detokenize", "  starling detokenize -m qwen.gguf 9707 1879"),
    ("logits", "  starling logits qwen.gguf \"The capital of France is\""),
    ("perplexity", "  starling perplexity -m qwen.gguf --file text.txt"),
    (
        "quantize",
        "  starling quantize model-f16.gguf model-q4.gguf Q4_K_M\n  \
         starling quantize model-f16.gguf model-iq2.gguf IQ2_XS --imatrix imatrix.gguf",
    ),
    ("verify", "  starling run \"Once\" --receipt answer.json && starling verify answer.json"),
    ("pull", "  starling pull hf:OWNER/REPO:Q4_K_M --name qwen && starling chat qwen"),
    ("list", "  starling list"),
    ("show", "  starling show qwen"),
    ("rm", "  starling rm qwen"),
    ("health", "  starling health --ready"),
    ("admin", "  STARLING_ADMIN_KEY=… starling admin models"),
    ("man", "  starling man ~/.local/share/man/man1"),
    ("completions", "  starling completions bash > ~/.local/share/bash-completion/completions/starling"),
];

/// Options that all commands would have, and the commands that do not use them.
const UNUSED: [(&str, &[&str]); 12] = [
    ("quantize", &["model", "isa", "kv_type", "working_memory"]),
    ("inspect", &["threads", "isa", "kv_type", "working_memory"]),
    ("tokenize", &["threads", "isa", "kv_type", "working_memory"]),
    ("detokenize", &["threads", "isa", "kv_type", "working_memory"]),
    ("pull", &ALL),
    ("list", &ALL),
    ("show", &ALL),
    ("rm", &ALL),
    ("health", &ALL),
    ("admin", &ALL),
    ("man", &ALL),
    ("completions", &ALL),
];
const ALL: [&str; 5] = ["model", "threads", "isa", "kv_type", "working_memory"];
/// Names of these options where they differ from their ids, and their letters.
const LONGS: [(&str, &str); 2] = [("kv_type", "kv-type"), ("working_memory", "working-memory")];
const SHORTS: [(&str, char); 2] = [("model", 'm'), ("threads", 't')];

const TEMPLATE: &str = "{about-with-newline}\n{before-help}{usage-heading} {usage}\n\n{all-args}{after-help}";

/// The examples of a command.
pub fn examples(name: &str) -> Option<&'static str> {
    EXAMPLES.iter().find(|(command, _)| *command == name).map(|(_, text)| *text)
}

/// Adds examples to the commands, and replaces options that they do not use by hidden ones that say so.
pub fn describe(command: Command) -> Command {
    command.mut_subcommands(describe_one)
}

fn describe_one(mut command: Command) -> Command {
    let name = command.get_name().to_string();
    command = command.help_template(TEMPLATE);
    if let Some(examples) = examples(&name) {
        command = command.before_help(format!("Examples:\n{examples}"));
    }
    let unused = UNUSED.iter().find(|(command, _)| *command == name).map_or(&[][..], |(_, options)| options);
    for id in unused {
        let message = match *id {
            "model" if name == "quantize" => {
                "quantize takes its input as an argument, not by --model: starling quantize INPUT OUTPUT TYPE"
                    .to_string()
            }
            _ => format!("{name} does not use this option"),
        };
        let refuse = move |_: &str| Err::<String, String>(message.clone());
        let long = LONGS.iter().find(|(known, _)| known == id).map_or(*id, |(_, long)| *long);
        let mut option = Arg::new(*id).long(long).hide(true).value_parser(refuse).value_name("VALUE");
        if let Some((_, short)) = SHORTS.iter().find(|(known, _)| known == id) {
            option = option.short(*short);
        }
        command = command.arg(option);
    }
    command
}

/// Writes a man page for each command into a directory, with its examples.
///
/// # Errors
/// If a page cannot be written.
pub fn man_pages(command: Command, directory: &Path) -> Result<(), Failure> {
    let file_error = |path: &Path| {
        let path = path.to_path_buf();
        move |source| Failure::File { path, source }
    };
    fs::create_dir_all(directory).map_err(file_error(directory))?;
    clap_mangen::generate_to(command, directory).map_err(file_error(directory))?;
    for (name, text) in EXAMPLES {
        let path = directory.join(format!("starling-{name}.1"));
        let mut page = OpenOptions::new().append(true).open(&path).map_err(file_error(&path))?;
        // a line of roff must not begin with a dot or an apostrophe
        let lines = text.replace('\\', "\\e").replace("\n.", "\n\\&.").replace("\n'", "\n\\&'");
        write!(page, ".SH EXAMPLES\n.nf\n{lines}\n.fi\n").map_err(file_error(&path))?;
    }
    Ok(())
}
