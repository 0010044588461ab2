//! Options of other programs, and what Starling has in their place.

use std::ffi::OsString;

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Options of llama.cpp and ollama. Those with one dash and several letters would be read as several options.
const TIPS: [(&[&str], &str); 29] = [
    (&["-ngl", "--n-gpu-layers", "--gpu-layers"], "Starling computes on the CPU: leave it out"),
    (
        &["-sm", "--split-mode", "-mg", "--main-gpu", "-ts", "--tensor-split"],
        "Starling computes on the CPU: leave it out",
    ),
    (&["-fa", "--flash-attn"], "attention is always computed in blocks, as flash attention does: leave it out"),
    (&["--listen", "--bind", "--addr", "--address"], "for the address: serve --host ADDRESS --port N"),
    (&["--mlock"], "weights are copied into memory at the start: leave it out"),
    (&["--no-mmap", "--mmap"], "files are mapped only while they are loaded: leave it out"),
    (&["--numa"], "the server has a worker on each NUMA node: leave it out"),
    (
        &["-cnv", "--conversation", "-i", "--interactive", "--interactive-first"],
        "for a conversation: starling chat MODEL",
    ),
    (&["-no-cnv", "--no-conversation"], "to continue a text without a chat template: --raw"),
    (&["-sys"], "for a system message: --system TEXT"),
    (&["--model-path"], "for the model: --model MODEL"),
    (
        &["--queue-size", "--max-queue-size"],
        "for the requests that wait: serve --queue-high N; further ones are refused with status 429",
    ),
    (&["-hf", "-hfr", "--hf-repo"], "for a model of Hugging Face: --model hf:OWNER/REPO:QUANT"),
    (&["-hff", "--hf-file"], "for a file of Hugging Face: --model hf:OWNER/REPO/FILE.gguf"),
    (&["-mu", "--model-url"], "for a model at an address: --model https://…"),
    (&["-np", "--parallel"], "for the number of sequences that run at once: serve --max-seqs N"),
    (&["-cb", "--cont-batching", "-nocb"], "requests are always batched: leave it out"),
    (&["-b", "--batch-size", "-ub", "--ubatch-size"], "for the tokens of a step: serve --batch-tokens N"),
    (
        &["-ctk", "--cache-type-k", "-ctv", "--cache-type-v"],
        "for the type of the KV cache: --kv-type f16, f32, k8 or q8",
    ),
    (&["-tb", "--threads-batch"], "prefill and decode use the same threads: --threads N"),
    (&["--jinja", "--no-jinja"], "the chat template is always rendered: leave it out"),
    (&["-r", "--reverse-prompt"], "to stop at a text: --stop TEXT"),
    (&["-e", "--escape"], "the shell writes a newline: $'one\\ntwo'"),
    (&["-md", "--model-draft"], "for a draft model: --draft-model MODEL"),
    (&["--draft", "--draft-n"], "for the number of draft tokens: --draft-max N"),
    (
        &["--mirostat", "--mirostat-lr", "--mirostat-ent"],
        "Mirostat is not supported; --min-p and --typical limit the choice too",
    ),
    (&["--keep"], "a chat drops its oldest messages when the context is full; a prompt is never cut"),
    (
        &["--verbose", "-v", "--log-verbosity"],
        "for timings: run prints them, chat has --stats, serve has --log-level debug",
    ),
    (&["--slots", "--metrics", "--props", "--no-webui"], "always there: leave it out"),
];
/// Commands whose options these might be.
const COMMANDS: [&str; 4] = ["run", "chat", "serve", "bench"];

/// The tip for an option of another program among the arguments: `found` is that of clap's error, if it is one.
pub fn tip(arguments: &[OsString], found: Option<&str>) -> Option<(String, &'static str)> {
    let mut words =
        arguments.iter().skip(1).filter_map(|word| word.to_str()).skip_while(|word| !COMMANDS.contains(word));
    words.next()?;
    let words = words.take_while(|word| *word != "--");
    let name = |word: &str| word.split('=').next().unwrap_or_default().to_string();
    // one dash and several letters: clap would read `-fa` as `-f a`
    let is_bundle = |word: &str| word.len() > 2 && word.starts_with('-') && !word.starts_with("--");
    let mut words = words.map(name).filter(|word| is_bundle(word) || found == Some(word));
    let tip = |word: String| {
        let (_, tip) = TIPS.iter().find(|(names, _)| names.contains(&&*word))?;
        Some((word, *tip))
    };
    words.find_map(tip)
}

/// clap's error with a tip of the table, and without suggestions that have another meaning.
pub fn improved(mut error: clap::Error, arguments: &[OsString], command: &mut Command) -> clap::Error {
    if !error.use_stderr() {
        return error;
    }
    let context = |error: &clap::Error, kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let found = context(&error, ContextKind::InvalidArg);
    let found = found.as_deref().map(|word| word.split(['=', ' ']).next().unwrap_or_default().to_string());
    if let Some(tip) = tip(arguments, found.as_deref()) {
        return unknown(tip);
    }
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let Some(found) = found else { return error };
    if let Some(suggested) = context(&error, ContextKind::SuggestedArg)
        && !is_near(&found, &suggested)
    {
        error.remove(ContextKind::SuggestedArg);
        // clap's usage line names the suggestion too
        let name =
            arguments.iter().filter_map(|word| word.to_str()).find(|word| command.find_subcommand(word).is_some());
        if let Some(command) = name.and_then(|name| command.find_subcommand_mut(name)) {
            error.insert(ContextKind::Usage, ContextValue::StyledStr(command.render_usage()));
        }
    }
    // an option is not a text that lacks `--`
    error.remove(ContextKind::Suggested);
    if !found.starts_with('-') {
        let tip = "a prompt of several words is one argument: put it in quotes";
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

/// The error that names an option of another program.
pub fn unknown((word, tip): (String, &'static str)) -> clap::Error {
    let message = format!("Starling has no option '{word}'\n\n  tip: {tip}\n\nFor more information, try '--help'.\n");
    clap::Error::raw(ErrorKind::UnknownArgument, message)
}

/// Whether an option is probably a misspelling of another: a few letters differ, or one begins with the other.
fn is_near(found: &str, known: &str) -> bool {
    let (found, known) = (found.trim_start_matches('-'), known.trim_start_matches('-'));
    let most = (found.len() / 4).clamp(1, 3);
    strsim::damerau_levenshtein(found, known) <= most || (found.len() > 3 && known.starts_with(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(line: &str) -> Option<String> {
        let arguments: Vec<OsString> = line.split(' ').map(Into::into).collect();
        tip(&arguments, None).map(|(word, _)| word)
    }

    #[test]
    fn options_of_other_programs_are_found() {
        assert_eq!(found("starling run -m x -ngl 99 hello").as_deref(), Some("-ngl"));
        assert_eq!(found("starling run -fa on").as_deref(), Some("-fa"));
        assert_eq!(found("starling run -- -fa"), None);
        // long options are found by clap first
        let of = |line: &str, word: &str| {
            let arguments: Vec<OsString> = line.split(' ').map(Into::into).collect();
            tip(&arguments, Some(word)).map(|(_, tip)| tip.split(": ").last().unwrap_or_default().to_string())
        };
        assert_eq!(of("starling serve --model-path x", "--model-path").as_deref(), Some("--model MODEL"));
        let queue = of("starling serve --queue-size=9", "--queue-size").expect("a tip");
        assert!(queue.starts_with("serve --queue-high N"), "{queue}");
        assert_eq!(found("starling run -n 4 -t2 x"), None);
        assert_eq!(found("starling embed -fa"), None);
    }

    #[test]
    fn only_near_names_are_suggested() {
        assert!(is_near("--ctx-sise", "--ctx-size") && is_near("--temprature", "--temperature"));
        assert!(is_near("--grammar-fil", "--grammar-file"));
        assert!(!is_near("--temp", "--chat-template") && !is_near("--top-p", "--otlp-endpoint"));
    }
}
