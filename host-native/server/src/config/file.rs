//! Settings files: TOML, YAML or JSON, as one table.

use std::path::Path;

use starling_host::error::Failure;
use starling_host::text_file::text_file;

/// A settings file.
#[derive(Debug)]
pub struct SettingsFile<'a> {
    path: &'a Path,
    text: String,
    pub table: toml::Table,
}

impl SettingsFile<'_> {
    pub fn path(&self) -> &Path {
        self.path
    }

    /// Reads a file in the format that its extension names: `.json`, `.yaml` or `.yml`, else TOML.
    ///
    /// # Errors
    /// If the file cannot be read, or is malformed: with its line.
    pub fn read(path: &Path) -> Result<SettingsFile<'_>, Failure> {
        let text = text_file(path)?;
        let table = match path.extension().and_then(|extension| extension.to_str()) {
            Some("json") => serde_json::from_str(&text).map_err(|e| (e.line(), e.to_string())),
            Some("yaml" | "yml") => serde_norway::from_str(&text)
                .map_err(|e| (e.location().map_or(0, |location| location.line()), e.to_string())),
            _ => text.parse().map_err(|e: toml::de::Error| {
                let line = e.span().map_or(0, |span| text[..span.start.min(text.len())].lines().count().max(1));
                (line, e.message().to_string())
            }),
        };
        let wrong = |(line, what)| Failure::Usage(format!("{}: line {line}: {what}", path.display()));
        let table: toml::Table = table.map_err(wrong)?;
        Ok(SettingsFile { path, text, table })
    }

    /// An error at a key of this file.
    pub fn error(&self, key: &str, what: impl std::fmt::Display) -> Failure {
        Failure::Usage(format!("{}: line {}: {key}: {what}", self.path.display(), self.line(key)))
    }

    /// The line of a key, such as `port` or `models.chat.ctx-size`: the first line that begins with its last part, after
    /// the lines of the parts before it.
    fn line(&self, key: &str) -> usize {
        let mut parts = key.split('.').peekable();
        let mut found = 1;
        for (i, line) in self.text.lines().enumerate() {
            let Some(part) = parts.peek() else { break };
            let begins = |line: &str| line.trim_start_matches(['[', '"', '{', ' ']).starts_with(part);
            let header = line.trim_start().strip_prefix('[').is_some_and(|header| header.contains(part));
            if begins(line.trim_start()) || header {
                found = i + 1;
                parts.next();
                while header && parts.peek().is_some_and(|next| line.contains(&format!(".{next}"))) {
                    parts.next();
                }
            }
        }
        found
    }
}

/// A value as text, as a flag would have it; `None` for tables and dates.
pub fn plain(value: &toml::Value) -> Option<String> {
    Some(match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Integer(n) => n.to_string(),
        toml::Value::Float(x) => x.to_string(),
        toml::Value::Boolean(b) => b.to_string(),
        toml::Value::Array(items) => items.iter().map(plain).collect::<Option<Vec<_>>>()?.join(","),
        _ => return None,
    })
}
