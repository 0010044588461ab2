//! Checked forms of what comes from a hub, a URL or a file of the store: digests, names of files, paths, commits. Nothing else
//! becomes part of a path or of a URL.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A text is not what it has to be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("found {kind} {found:?}, expected {expected}")]
pub struct NameError {
    kind: &'static str,
    /// At most [`MAX_QUOTE`] characters.
    found: String,
    expected: &'static str,
}

const MAX_QUOTE: usize = 100;

impl NameError {
    fn new(kind: &'static str, found: &str, expected: &'static str) -> NameError {
        NameError { kind, found: found.chars().take(MAX_QUOTE).collect(), expected }
    }
}

macro_rules! checked {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $expected:literal, $parse:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// # Errors
            /// If the text has another form.
            pub fn parse(text: &str) -> Result<$name, NameError> {
                let parse: fn(&str) -> Option<String> = $parse;
                parse(text).map($name).ok_or_else(|| NameError::new($kind, text, $expected))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;

            fn try_from(text: String) -> Result<$name, NameError> {
                $name::parse(&text)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }
    };
}

checked!(
    /// A SHA-256, in lower case: the name of a blob.
    Sha256Hex,
    "digest",
    "64 hexadecimal digits",
    |text| (text.len() == 64 && is_hex(text)).then(|| text.to_ascii_lowercase())
);

checked!(
    /// The name of a model's file in its directory of the store, whose own files have other names.
    FileName,
    "file name",
    "letters, digits and . _ - + : @, at most 128, no leading dot, and no name of the store's own files",
    |text| (is_name(text) && !OWN_FILES.contains(&text)).then(|| text.into())
);

checked!(
    /// The path of a file in a repository: names without `.` and `..`, separated by `/`.
    RepoPath,
    "path",
    "names of letters, digits and . _ - +, separated by /",
    |text| is_relative(text).then(|| text.into())
);

checked!(
    /// A commit of a repository.
    Commit,
    "commit",
    "40 or 64 hexadecimal digits",
    |text| (matches!(text.len(), 40 | 64) && is_hex(text)).then(|| text.to_ascii_lowercase())
);

/// Files of the store beside those of a model.
const OWN_FILES: [&str; 3] = ["lock", "manifest.json", "manifest.new"];

impl Sha256Hex {
    pub fn of(digest: &[u8; 32]) -> Sha256Hex {
        Sha256Hex(super::download::hex(digest))
    }
}

impl RepoPath {
    /// The last part, as the name of a model's file.
    ///
    /// # Errors
    /// If it is none.
    pub fn file_name(&self) -> Result<FileName, NameError> {
        FileName::parse(self.0.rsplit('/').next().unwrap_or(&self.0))
    }
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether a text may be the name of a model in the store.
pub fn is_name(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-+:@".contains(c);
    !text.is_empty() && text.len() <= 128 && !text.starts_with('.') && text.chars().all(allowed)
}

/// Whether `text` is a path that cannot leave the directory that it is joined to.
pub fn is_relative(text: &str) -> bool {
    text.split('/').all(is_part)
}

/// Whether `text` may be a part of a path or an owner, repository or type in a source.
pub fn is_part(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '+');
    !text.is_empty() && text != "." && text != ".." && text.chars().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_digests_names_paths_and_commits_pass() {
        let (digest, commit) = ("0aB".repeat(21) + "f", "0aB".repeat(13) + "f");
        assert_eq!(Sha256Hex::parse(&digest).unwrap().as_str(), digest.to_ascii_lowercase());
        assert_eq!(Commit::parse(&commit).unwrap().as_str(), commit.to_ascii_lowercase());
        assert_eq!(FileName::parse("m-00001-of-00002.gguf").unwrap().as_str(), "m-00001-of-00002.gguf");
        assert_eq!(RepoPath::parse("d/a.gguf").unwrap().file_name().unwrap().as_str(), "a.gguf");
        let padded = "x/".repeat(32);
        for text in
            ["", "/path/victim", "..", "../x", "a/../b", "a//b", "a\\b", "a\0", "a b", "é", &padded, &digest[1..]]
        {
            assert!(Sha256Hex::parse(text).is_err() && Commit::parse(text).is_err(), "{text}");
            assert!(RepoPath::parse(text).is_err() || text == &digest[1..], "{text}");
        }
        for text in ["", ".", "..", ".hidden", "a/b", "/a", "lock", "manifest.json", "manifest.new", &"x".repeat(129)] {
            assert!(FileName::parse(text).is_err(), "{text}");
        }
        assert!(RepoPath::parse("d/lock").unwrap().file_name().is_err());
        let error = Sha256Hex::parse(&"/".repeat(1000)).unwrap_err().to_string();
        assert!(error.len() < 200 && error.ends_with("expected 64 hexadecimal digits"), "{error}");
        assert!(serde_json::from_str::<Sha256Hex>("\"/path/victim\"").is_err());
    }
}
