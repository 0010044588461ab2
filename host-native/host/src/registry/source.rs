//! Syntax of `hf:OWNER/REPO[:QUANT | /FILE.gguf][@REVISION]`.

use std::fmt;

use super::SourceError;
use super::names::{is_part, is_relative};

/// A model of the Hugging Face hub.
#[derive(Debug, PartialEq, Eq)]
pub struct HubSource {
    pub owner: String,
    pub repo: String,
    pub selection: Selection,
    /// Branch, tag or commit.
    pub revision: String,
}

/// Where a model is downloaded from.
#[derive(Debug, PartialEq, Eq)]
pub enum RemoteSource {
    Hub(HubSource),
    Url(String),
}

impl RemoteSource {
    /// `None` if `text` is neither `hf:…` nor a URL; an error if `hf:…` is malformed.
    pub fn parse(text: &str) -> Option<Result<RemoteSource, SourceError>> {
        if text.starts_with("hf:") {
            let hub = HubSource::parse(text).ok_or_else(|| SourceError::Syntax { text: text.into() });
            return Some(hub.map(RemoteSource::Hub));
        }
        (text.starts_with("https://") || text.starts_with("http://")).then(|| Ok(RemoteSource::Url(text.into())))
    }
}

impl fmt::Display for RemoteSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RemoteSource::Url(url) => f.write_str(url),
            RemoteSource::Hub(HubSource { owner, repo, selection, revision }) => {
                write!(f, "hf:{owner}/{repo}")?;
                match selection {
                    Selection::Default => {}
                    Selection::Quant(quant) => write!(f, ":{quant}")?,
                    Selection::File(file) => write!(f, "/{file}")?,
                }
                if revision == "main" { Ok(()) } else { write!(f, "@{revision}") }
            }
        }
    }
}

/// Which of several model files is meant.
#[derive(Debug, PartialEq, Eq)]
pub enum Selection {
    /// The only model, or the one in Q4_K_M.
    Default,
    /// The model whose name has this quantisation; case is ignored.
    Quant(String),
    /// A file by its path in the repository.
    File(String),
}

impl HubSource {
    /// `None` if `text` does not have this form.
    pub fn parse(text: &str) -> Option<HubSource> {
        let rest = text.strip_prefix("hf:")?;
        let (rest, revision) = rest.split_once('@').unwrap_or((rest, "main"));
        let (owner, rest) = rest.split_once('/')?;
        let (repo, selection) = if let Some((repo, file)) = rest.split_once('/') {
            let is_file = file.ends_with(".gguf") && is_relative(file);
            (repo, is_file.then(|| Selection::File(file.into()))?)
        } else if let Some((repo, quant)) = rest.split_once(':') {
            (repo, is_part(quant).then(|| Selection::Quant(quant.into()))?)
        } else {
            (rest, Selection::Default)
        };
        let valid = is_part(owner) && is_part(repo) && is_relative(revision);
        valid.then(|| HubSource { owner: owner.into(), repo: repo.into(), selection, revision: revision.into() })
    }

    pub fn repo_id(&self) -> String {
        format!("{}/{}", self.owner, self.repo)
    }
}
