//! Settings in effect: defaults, then the file, the environment and the flags; and the models that they name.

use std::collections::BTreeMap;
use std::env;
use std::path::{Path, PathBuf};

use starling::kernels::attention::KvType;
use starling_host::error::Failure;
use starling_host::load::ModelOptions;
use starling_host::pool::MAX_THREADS;

use super::file::{SettingsFile, plain};
use super::value::{Bytes, LoadPolicy, Value};
use super::{Setting, Settings, TABLE, setting};

/// Keys of the file that set [`ModelOptions`], which other commands have too.
const MODEL_KEYS: [&str; 5] = ["model", "threads", "isa", "kv-type", "working-memory"];
/// The table of models in the file.
const MODELS: &str = "models";

/// All that flags, environment and file say.
#[derive(Debug, Clone)]
pub struct Configuration {
    pub settings: Settings,
    /// Arguments that all models have; without a model.
    pub model: ModelOptions,
    /// The models, the default one first.
    pub models: Vec<ModelEntry>,
    /// Where each setting comes from, unless it has its default.
    pub origins: BTreeMap<&'static str, String>,
}

/// A model to serve.
#[derive(Debug, Clone)]
pub struct ModelEntry {
    /// Name in the API; `None`: after the file.
    pub name: Option<String>,
    /// Source as `-m` takes it, and the arguments of the model; the bundled model without a source.
    pub args: ModelOptions,
    pub settings: Settings,
}

/// What the command line says.
#[derive(Debug, Clone, Default)]
pub struct ServeOptions {
    /// Models: `[NAME=]SOURCE`.
    pub models: Vec<PathBuf>,
    /// Options that all models have; without a model.
    pub model: ModelOptions,
    /// Settings given as flags.
    pub flags: Vec<(&'static str, String)>,
    /// The settings file.
    pub config: Option<PathBuf>,
}

impl ServeOptions {
    /// The settings in effect, and the models that they name.
    ///
    /// # Errors
    /// The first invalid value, with its flag, environment variable, or file, line and key.
    pub fn configuration(&self) -> Result<Configuration, Failure> {
        let variable = |key: &str| {
            let name = variable(key);
            // an empty variable is none, as in compose files
            let value = env::var_os(&name).filter(|value| !value.is_empty())?;
            Some((name, value.to_string_lossy().into_owned()))
        };
        self.layered(variable)
    }

    fn layered(&self, variable: impl Fn(&str) -> Option<(String, String)>) -> Result<Configuration, Failure> {
        let file = self.config.as_deref().map(SettingsFile::read).transpose()?;
        let mut all = Configuration {
            settings: Settings::default(),
            model: ModelOptions { model: None, ..self.model.clone() },
            models: Vec::new(),
            origins: BTreeMap::new(),
        };
        let mut sources = self.models.clone();
        if let Some(file) = &file {
            all.read_file(file, &mut sources)?;
        }
        for setting in TABLE {
            if let Some((name, text)) = variable(setting.key) {
                all.set(setting, &text, format!("environment variable {name}")).map_err(|e| usage(&name, &e))?;
            }
        }
        for (key, text) in &self.flags {
            let Some(setting) = setting(key) else { continue };
            all.set(setting, text, format!("flag --{key}")).map_err(|e| usage(&format!("--{key}"), &e))?;
        }
        all.settings.check().map_err(Failure::Usage)?;
        all.models = sources.iter().map(|source| all.entry(source)).collect();
        if let Some(file) = &file {
            all.read_models(file)?;
        }
        if all.models.is_empty() && all.settings.models_dir.is_none() {
            let (args, settings) = (all.model.clone(), all.settings.clone());
            all.models.push(ModelEntry { name: None, args, settings });
        }
        if let (Some(name), Some(first)) = (&all.settings.model_name, all.models.first_mut()) {
            first.name.get_or_insert_with(|| name.clone());
        }
        Ok(all)
    }
}

impl Configuration {
    fn set(&mut self, setting: &'static Setting, text: &str, origin: String) -> Result<(), String> {
        (setting.set)(&mut self.settings, text)?;
        self.origins.insert(setting.key, origin);
        Ok(())
    }

    /// The entry of `--model [NAME=]SOURCE`.
    fn entry(&self, text: &Path) -> ModelEntry {
        let named = text.to_str().filter(|_| !text.exists()).and_then(|text| text.split_once('='));
        let (name, source) = match named {
            Some((name, source)) if is_name(name) => (Some(name.to_string()), PathBuf::from(source)),
            _ => (None, text.into()),
        };
        ModelEntry { name, args: self.args_of(Some(source)), settings: self.settings.clone() }
    }

    fn args_of(&self, source: Option<PathBuf>) -> ModelOptions {
        ModelOptions { model: source, ..self.model.clone() }
    }

    /// Reads the settings of the file, without its models.
    fn read_file(&mut self, file: &SettingsFile<'_>, sources: &mut Vec<PathBuf>) -> Result<(), Failure> {
        let origin = format!("file {}", file.path().display());
        for (name, value) in file.table.iter().filter(|(name, _)| *name != MODELS) {
            let key = name.replace('_', "-");
            let text = text_of(value).map_err(|e| file.error(name, e))?;
            match setting(&key) {
                Some(setting) => self.set(setting, &text, origin.clone()).map_err(|e| file.error(name, e))?,
                None if key == "model" => {
                    if sources.is_empty() {
                        sources.push(text.into());
                    }
                }
                None if MODEL_KEYS.contains(&key.as_str()) => {
                    model_key(&mut self.model, &key, &text).map_err(|e| file.error(name, e))?;
                }
                None => return Err(file.error(name, unknown(&key, |_| true))),
            }
        }
        Ok(())
    }

    /// Reads the `[models.NAME]` tables.
    fn read_models(&mut self, file: &SettingsFile<'_>) -> Result<(), Failure> {
        let Some(models) = file.table.get(MODELS) else { return Ok(()) };
        let expected = "expected a table of models: [models.NAME] with the key source";
        let models = models.as_table().ok_or_else(|| file.error(MODELS, expected))?;
        for (name, table) in models {
            let at = |key: &str| format!("{MODELS}.{name}.{key}");
            if !is_name(name) {
                return Err(file.error(&format!("{MODELS}.{name}"), "a name has letters, digits and . _ - / : @ only"));
            }
            let table = table.as_table().ok_or_else(|| file.error(&format!("{MODELS}.{name}"), expected))?;
            let known = self.models.iter().position(|entry| entry.name.as_deref() == Some(name));
            let mut entry = match known {
                Some(i) => self.models.remove(i),
                None => {
                    ModelEntry { name: Some(name.clone()), args: self.args_of(None), settings: self.settings.clone() }
                }
            };
            // what the table says overrides what all models have
            entry.args = ModelOptions { model: entry.args.model.clone(), ..clear(entry.args, table) };
            for (key, value) in table {
                let text = text_of(value).map_err(|e| file.error(&at(key), e))?;
                entry.set(&key.replace('_', "-"), &text).map_err(|e| file.error(&at(key), e))?;
            }
            entry.settings.check().map_err(|e| file.error(&format!("{MODELS}.{name}"), e))?;
            if entry.args.model.is_none() {
                return Err(file.error(&format!("{MODELS}.{name}"), "the key source is missing"));
            }
            self.models.insert(known.unwrap_or(self.models.len()), entry);
        }
        Ok(())
    }
}

impl ModelEntry {
    /// An on-demand model of the directory of `models_dir`.
    pub fn of_file(path: PathBuf, all: &Configuration) -> ModelEntry {
        let mut settings = all.settings.clone();
        settings.load.get_or_insert(LoadPolicy::OnDemand);
        ModelEntry { name: None, args: all.args_of(Some(path)), settings }
    }

    /// A model with a name and source, and the settings that all models have.
    ///
    /// # Errors
    /// If a model may not have this name.
    pub fn named(name: &str, source: PathBuf, all: &Configuration) -> Result<ModelEntry, String> {
        if !is_name(name) {
            return Err(format!("found the name {name:?}, expected letters, digits and . _ - / : @ only"));
        }
        let (args, settings) = (all.args_of(Some(source)), all.settings.clone());
        Ok(ModelEntry { name: Some(name.into()), args, settings })
    }

    /// Sets a key of `[models.NAME]`.
    ///
    /// # Errors
    /// If the key is unknown or not of a model, or the value is invalid.
    pub fn set(&mut self, key: &str, text: &str) -> Result<(), String> {
        match setting(key) {
            Some(setting) if setting.is_per_model => (setting.set)(&mut self.settings, text),
            Some(_) => Err("a setting of the server, not of a model: move it out of the table".into()),
            None if key == "source" => {
                self.args.model = Some(text.into());
                Ok(())
            }
            None if MODEL_KEYS[1..].contains(&key) => model_key(&mut self.args, key, text),
            None => Err(unknown(key, |setting| setting.is_per_model)),
        }
    }
}

/// The options without those that the table sets.
fn clear(mut args: ModelOptions, table: &toml::Table) -> ModelOptions {
    let has = |key: &str| table.keys().any(|name| name.replace('_', "-") == key);
    args.threads = args.threads.filter(|_| !has("threads"));
    args.isa = args.isa.filter(|_| !has("isa"));
    args.kv_type = args.kv_type.filter(|_| !has("kv-type"));
    args.working_memory = args.working_memory.filter(|_| !has("working-memory"));
    args
}

fn usage(place: &str, error: &str) -> Failure {
    Failure::Usage(format!("{place}: {error}"))
}

fn variable(key: &str) -> String {
    format!("STARLING_{}", key.replace('-', "_").to_uppercase())
}

/// Whether a model may have this name.
pub fn is_name(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-/:@".contains(c);
    !text.is_empty() && text.len() <= 128 && text.chars().all(allowed) && !text.starts_with(['-', '/'])
}

fn text_of(value: &toml::Value) -> Result<String, String> {
    let expected = || format!("found a {}, expected a string, number, boolean or array of them", value.type_str());
    plain(value).ok_or_else(expected)
}

fn unknown(key: &str, is_known: impl Fn(&Setting) -> bool) -> String {
    let keys = TABLE.iter().filter(|setting| is_known(setting)).map(|setting| setting.key).chain(MODEL_KEYS);
    let near = keys.min_by_key(|known| strsim::levenshtein(known, key)).unwrap_or_default();
    format!("unknown setting; did you mean {near}?")
}

/// Sets a model argument from the file unless a flag or environment variable has set it.
fn model_key(model: &mut ModelOptions, key: &str, text: &str) -> Result<(), String> {
    match key {
        "isa" => model.isa = model.isa.take().or(Some(text.into())),
        "threads" => {
            let n = u16::read(text)?;
            n.within(1.0..=MAX_THREADS as f64)?;
            model.threads = model.threads.or(Some(n));
        }
        "working-memory" => model.working_memory = model.working_memory.or(Some(Bytes::read(text)?)),
        _ => {
            let kind = match &*text.to_ascii_lowercase() {
                "f32" => KvType::F32,
                "f16" => KvType::F16,
                "k8" => KvType::K8,
                "q8" => KvType::Q8,
                _ => return Err(format!("found {text:?}, expected f32, f16, k8 or q8")),
            };
            model.kv_type = model.kv_type.or(Some(kind));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn none(_: &str) -> Option<(String, String)> {
        None
    }

    fn file(name: &str, text: &str) -> PathBuf {
        let path = env::temp_dir().join(format!("starling-{}-{name}.toml", std::process::id()));
        fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn flags_override_the_environment_and_both_override_the_file() {
        let path = file("layers", "port = 1\nqueue-high = 300\nmax_seqs = 3\nkv-memory = \"2GiB\"\nthreads = 3\n");
        let args =
            ServeOptions { flags: vec![("port", "3".into())], config: Some(path.clone()), ..ServeOptions::default() };
        let environment = |key: &str| match key {
            "port" | "queue-high" => Some((variable(key), "400".to_string())),
            _ => None,
        };
        let all = args.layered(environment).unwrap();
        let (s, m) = (&all.settings, &all.model);
        assert_eq!((s.port, s.queue_high, s.max_seqs, s.kv_memory), (3, 400, 3, Some(Bytes(2 << 30))));
        assert_eq!(m.threads, Some(3));
        let origins = ["port", "queue-high", "max-seqs", "host"].map(|key| all.origins.get(key).map(String::as_str));
        let file = format!("file {}", path.display());
        let variable = Some("environment variable STARLING_QUEUE_HIGH");
        assert_eq!(origins, [Some("flag --port"), variable, Some(&file), None]);
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn printed_settings_read_back_equal() {
        let path = file(
            "shown",
            &Settings { cors_origins: vec!["a".into(), "b".into()], ..Settings::default() }.to_toml(&BTreeMap::new()),
        );
        let args = ServeOptions { config: Some(path.clone()), ..ServeOptions::default() };
        let s = args.layered(none).unwrap().settings;
        assert_eq!(s.to_toml(&BTreeMap::new()), fs::read_to_string(&path).unwrap());
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn printed_settings_say_where_they_are_from() {
        let keys = file("keys", "one\n# a comment\ntwo alice\n");
        let flags = vec![("queue-high", "8".into()), ("api-key-file", keys.display().to_string())];
        let all = ServeOptions { flags, ..ServeOptions::default() }.layered(none).unwrap();
        assert_eq!(all.settings.queue_low(), 6);
        let text = all.settings.to_toml(&all.origins);
        for line in ["queue-high = 8  # flag --queue-high", "# api-key = (2 keys set)", "# queue-low ="] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        fs::remove_file(keys).unwrap();
    }

    #[test]
    fn an_invalid_value_is_reported_with_file_and_key() {
        for (name, text, parts) in [
            ("kind", "port = \"x\"", ["port", "expected an integer from 0 to 65535"]),
            ("range", "max-seqs = 0", ["max-seqs", "from 1 to 1024"]),
            ("unknown", "queue-hihg = 1", ["queue-hihg", "queue-high"]),
            ("syntax", "port = 1\nhost = ", ["line 2", ""]),
            ("order", "queue-low = 300", ["queue-low is 300", "queue-high is 256"]),
        ] {
            let path = file(name, text);
            let args = ServeOptions { config: Some(path.clone()), ..ServeOptions::default() };
            let error = args.layered(none).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
            fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn models_have_settings_of_their_own() {
        let text = "ctx-size = 100\nthreads = 2\n[models.a]\nsource = \"a.gguf\"\nctx-size = 200\nkv_type = \"k8\"\n\
                    [models.\"b@2\"]\nsource = \"hf:o/b\"\npin = true\nthreads = 1\nload = \"on-demand\"\n";
        let path = file("models", text);
        let models = vec!["c=c.gguf".into(), "d.gguf".into()];
        let args = ServeOptions { models, config: Some(path.clone()), ..ServeOptions::default() };
        let models = args.layered(none).unwrap().models;
        let of = |m: &ModelEntry| (m.name.clone(), m.args.model.clone(), m.settings.ctx_size, m.args.threads);
        let some = |name: &str| Some(name.to_string());
        assert_eq!(
            models.iter().map(of).collect::<Vec<_>>(),
            [
                (some("c"), Some("c.gguf".into()), Some(100), Some(2)),
                (None, Some("d.gguf".into()), Some(100), Some(2)),
                (some("a"), Some("a.gguf".into()), Some(200), Some(2)),
                (some("b@2"), Some("hf:o/b".into()), Some(100), Some(1)),
            ]
        );
        assert_eq!((models[2].settings.pin, models[3].settings.pin), (false, true));
        assert_eq!(models[3].settings.load, Some(LoadPolicy::OnDemand));
        fs::remove_file(path).unwrap();
        for (name, text, parts) in [
            ("scope", "[models.a]\nsource = \"a\"\nport = 1\n", ["line 3: models.a.port", "move it out"]),
            ("none", "port = 1\n[models.a]\npin = true\n", ["line 2: models.a", "source is missing"]),
            ("near", "[models.a]\nsource = \"a\"\nctx-sise = 1\n", ["line 3: models.a.ctx-sise", "ctx-size"]),
            ("name", "[models.\"a b\"]\nsource = \"a\"\n", ["line 1: models.a b", "letters"]),
        ] {
            let path = file(name, text);
            let args = ServeOptions { config: Some(path.clone()), ..ServeOptions::default() };
            let error = args.layered(none).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
            fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn files_of_all_formats_say_the_same() {
        let of = |extension: &str, text: &str| {
            let path = env::temp_dir().join(format!("starling-{}-format.{extension}", std::process::id()));
            fs::write(&path, text).unwrap();
            let args = ServeOptions { config: Some(path.clone()), ..ServeOptions::default() };
            let result =
                args.layered(none).map(|all| (all.settings.to_toml(&BTreeMap::new()), all.models[0].settings.pin));
            fs::remove_file(path).unwrap();
            result.map_err(|e| e.to_string())
        };
        let toml = of("toml", "port = 7\ncors-origins = [\"a\", \"b\"]\n[models.m]\nsource = \"m\"\npin = true\n");
        let yaml = of("yaml", "port: 7\ncors-origins: [a, b]\nmodels:\n  m:\n    source: m\n    pin: true\n");
        let json =
            of("json", r#"{"port": 7, "cors-origins": ["a", "b"], "models": {"m": {"source": "m", "pin": true}}}"#);
        assert!(toml.is_ok());
        assert_eq!((&yaml, &json), (&toml, &toml));
        for (extension, text, part) in [
            ("yaml", "port: 7\nqueue-hihg: 1\n", "line 2: queue-hihg: unknown setting; did you mean queue-high?"),
            ("yaml", "port: 7\n  a: b\n", "line 2"),
            ("json", "{\n  \"port\": \"x\"\n}", "line 2: port: found \"x\""),
            ("json", "{\n  \"port\": }", "line 2"),
        ] {
            let error = of(extension, text).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn keys_are_distinct_and_differ_from_model_keys() {
        let mut keys: Vec<&str> = TABLE.iter().map(|s| s.key).chain(MODEL_KEYS).collect();
        keys.sort_unstable();
        assert!(keys.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
