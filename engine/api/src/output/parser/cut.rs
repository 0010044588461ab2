//! Calls of answers that were cut within them: the arguments end where the answer does.

use super::super::syntaxes::Body;
use super::super::values::{compact, json_string};
use super::{OutputParser, State};

impl OutputParser {
    /// Adds the call that was cut, if its name is known; `rest` is the text that is not read. Returns whether it was.
    pub(super) fn cut(&mut self, rest: &str) -> bool {
        if self.call.name.is_none() || matches!(self.state, State::Name | State::Begin | State::Key) {
            return false;
        }
        let arguments = self.cut_arguments(rest.trim_start());
        self.add_call(arguments, false);
        true
    }

    fn cut_arguments(&self, rest: &str) -> String {
        let call = &self.call;
        if call.has_args {
            return format!("{{{}}}", call.args);
        }
        if !call.args_begun {
            return String::new();
        }
        let last = match self.state {
            State::JsonArgs => compact(rest).0,
            State::TagArgs => self.cut_value(rest).map_or(String::new(), |(key, value, is_text)| {
                let value = if is_text { open_string(&value) } else { value.trim_start().into() };
                format!("{}:{value}", json_string(&key))
            }),
            State::PairArgs => self.cut_pair(rest),
            _ => String::new(),
        };
        // a comma of the model is not in the arguments yet
        let comma = if call.args.is_empty() || last.is_empty() { "" } else { "," };
        format!("{{{}{comma}{}", call.args, last.trim_start_matches(','))
    }

    /// A parameter `key=value` or `key:value` that is cut.
    fn cut_pair(&self, rest: &str) -> String {
        let (separator, quote) = match self.body() {
            Body::Pairs { quote } => (':', quote),
            _ => ('=', ""),
        };
        let Some((key, value)) = rest.split_once(separator) else { return String::new() };
        let key = key.trim_start_matches([',', ' ', '\n']).trim_matches(['"', '\'']);
        let value = value.trim_start();
        let quotes = [quote, "\"", "'"];
        let text = quotes.iter().filter(|quote| !quote.is_empty()).find_map(|quote| value.strip_prefix(quote));
        format!("{}:{}", json_string(key), text.map_or_else(|| value.into(), open_string))
    }
}

/// A JSON string without its closing quote.
fn open_string(text: &str) -> String {
    let mut json = json_string(text);
    json.pop();
    json
}
