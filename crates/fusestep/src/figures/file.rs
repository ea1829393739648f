//! Figures in a file: the user's cache, read and written.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use fusestep_collective::Link;
use fusestep_tensor::Quoted;
use fusestep_tensor_file::{Prepared, TensorFileError, commit_together};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

use super::machine;
use super::value::{Figures, VERSION};

/// Environment variable that names the file of figures in place of the user's cache, or is `none`.
pub const FIGURES_VARIABLE: &str = "FUSESTEP_FIGURES";

/// Version of the file's format.
const FORMAT: u64 = 1;

/// Most bytes of a file that is read.
const MOST_BYTES: u64 = 1 << 20;

/// Reasons why figures are not known. None of them is a failure of a run: settings keep their
/// defaults.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FiguresError {
    /// The user asks for none.
    #[error("figures of this machine are turned off by {FIGURES_VARIABLE}=none")]
    Off,
    /// Nothing was measured.
    #[error("no figures of this machine are known; `fusestep check` measures them")]
    Unmeasured,
    /// Neither variable names a folder of the user's.
    #[error("figures have no place; set XDG_CACHE_HOME, HOME or {FIGURES_VARIABLE}")]
    NoPlace,
    /// The file cannot be read.
    #[error("{path}: cannot read figures: {error}; `fusestep check` measures them anew")]
    Unread {
        /// The file.
        path: PathBuf,
        /// The system's words.
        error: io::Error,
    },
    /// The file holds something else.
    #[error("{path}: expected figures of a machine, found {found}; `fusestep check` measures them")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The content's defect.
        found: String,
    },
    /// The file is of another version, of fusestep or of the format.
    #[error(
        "{path}: expected figures by fusestep {VERSION}, found {found}; `fusestep check` measures \
         them anew"
    )]
    OtherVersion {
        /// The file.
        path: PathBuf,
        /// The version.
        found: String,
    },
    /// The file is of another machine.
    #[error(
        "{path}: expected figures of `{expected}`, found `{found}`; `fusestep check` measures them \
         anew",
        expected = Quoted(expected),
        found = Quoted(found)
    )]
    OtherProcessor {
        /// The file.
        path: PathBuf,
        /// This machine's processor.
        expected: String,
        /// The file's processor.
        found: String,
    },
    /// The file cannot be written.
    #[error("figures are not kept: {0}")]
    Unwritten(TensorFileError),
}

/// A file's content.
#[derive(Serialize, Deserialize)]
struct Content {
    format: u64,
    #[serde(flatten)]
    figures: Figures,
}

/// The place of figures.
enum Place {
    /// The user asks for none.
    Off,
    File(PathBuf),
}

/// The place that the environment names.
fn place(variable: &dyn Fn(&str) -> Option<OsString>) -> Result<Place, FiguresError> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    if let Some(named) = set(FIGURES_VARIABLE) {
        let is_off = named == OsStr::new("none");
        return Ok(if is_off { Place::Off } else { Place::File(named.into()) });
    }
    // A relative path in XDG_CACHE_HOME is to be ignored, says its specification.
    let cache = set("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = cache.or_else(|| set("HOME").map(|home| Path::new(&home).join(".cache")));
    let cache = cache.ok_or(FiguresError::NoPlace)?;
    Ok(Place::File(cache.join("fusestep").join("figures.json")))
}

impl Figures {
    /// The file in which this user's figures are: named by `FUSESTEP_FIGURES`, or in
    /// `XDG_CACHE_HOME`, or in `HOME/.cache`.
    ///
    /// # Errors
    /// [`FiguresError::Off`], [`FiguresError::NoPlace`].
    pub fn path() -> Result<PathBuf, FiguresError> {
        match place(&|name| env::var_os(name))? {
            Place::Off => Err(FiguresError::Off),
            Place::File(path) => Ok(path),
        }
    }

    /// The figures that were measured on this machine, from the file of [`Figures::path`].
    ///
    /// # Errors
    /// [`FiguresError`] says why there are none.
    pub fn of_this_machine() -> Result<Self, FiguresError> {
        let path = Self::path()?;
        let figures = Self::read(&path)?;
        let expected = machine::processor();
        if figures.processor != expected {
            return Err(FiguresError::OtherProcessor { path, expected, found: figures.processor });
        }
        Ok(figures)
    }

    /// The figures in a file, of any machine.
    ///
    /// # Errors
    /// [`FiguresError`] for a file that is not there, is damaged or is of another version.
    pub fn read(path: &Path) -> Result<Self, FiguresError> {
        let damaged = |found: String| FiguresError::Damaged { path: path.to_owned(), found };
        let unread = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => FiguresError::Unmeasured,
            _ => FiguresError::Unread { path: path.to_owned(), error },
        };
        let found = fs::metadata(path).map_err(unread)?;
        if !found.is_file() {
            return Err(damaged("a folder or device".to_owned()));
        }
        if found.len() > MOST_BYTES {
            return Err(damaged(format!("{} bytes", found.len())));
        }
        let text = fs::read(path).map_err(unread)?;
        let value: Value =
            serde_json::from_slice(&text).map_err(|error| damaged(format!("no JSON: {error}")))?;
        let format = value.get("format").and_then(Value::as_u64);
        let version = value.get("version").and_then(Value::as_str);
        let (Some(format), Some(version)) = (format, version) else {
            return Err(damaged("neither `format` nor `version`".to_owned()));
        };
        if format != FORMAT || version != VERSION {
            let found = format!("format {format} by fusestep {}", Quoted(version));
            return Err(FiguresError::OtherVersion { path: path.to_owned(), found });
        }
        let content: Content =
            serde_json::from_value(value).map_err(|error| damaged(error.to_string()))?;
        match content.figures.defect() {
            Some(defect) => Err(damaged(defect)),
            None => Ok(content.figures),
        }
    }

    /// Writes the figures, all or nothing; the file's folder is made if it is missing.
    ///
    /// # Errors
    /// [`FiguresError::Unwritten`], [`FiguresError::Damaged`] for figures that are no numbers.
    pub fn write(&self, path: &Path) -> Result<(), FiguresError> {
        let damaged = |found: String| FiguresError::Damaged { path: path.to_owned(), found };
        if let Some(defect) = self.defect() {
            return Err(damaged(defect));
        }
        let content = Content { format: FORMAT, figures: self.clone() };
        let text =
            serde_json::to_string_pretty(&content).map_err(|error| damaged(error.to_string()))?;
        if let Some(folder) = path.parent() {
            // A folder that cannot be made is named below, by what cannot be written there.
            let _ = fs::create_dir_all(folder);
        }
        let prepared = Prepared::bytes(path, text.as_bytes()).map_err(FiguresError::Unwritten)?;
        commit_together(vec![prepared]).map_err(FiguresError::Unwritten)
    }

    /// The first number that nothing can be predicted from.
    fn defect(&self) -> Option<String> {
        let is_rate = |rate: f64| rate.is_finite() && rate > 0.0;
        let is_link = |link: &Link| {
            let alpha = link.alpha_seconds;
            alpha.is_finite() && alpha >= 0.0 && is_rate(link.beta_bytes_per_second)
        };
        let world = self.worlds.iter().find(|of| {
            let costs = &of.costs;
            let links = [costs.all_reduce, costs.reduce_scatter, costs.all_gather];
            let rates = [costs.memory_bytes_per_second, costs.fresh_bytes_per_second];
            !links.iter().all(is_link) || !rates.iter().all(|rate| is_rate(*rate)) || of.ranks == 0
        });
        let mut threads = self.threads.iter();
        let threads = threads.find(|of| !is_rate(of.bytes_per_second) || of.threads == 0);
        let of_world = world.map(|of| format!("costs out of range of {} ranks", of.ranks));
        of_world.or(threads.map(|of| format!("a rate out of range of {} threads", of.threads)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_names_the_place() {
        let found = |variables: &[(&str, &str)]| {
            let of = |name: &str| {
                let mut known = variables.iter();
                known.find(|(own, _)| *own == name).map(|(_, value)| OsString::from(value))
            };
            match place(&of) {
                Ok(Place::File(path)) => path.display().to_string(),
                Ok(Place::Off) => "off".to_owned(),
                Err(error) => error.to_string(),
            }
        };
        let home = ("HOME", "/home/a");
        assert_eq!(found(&[home]), "/home/a/.cache/fusestep/figures.json");
        let cache = ("XDG_CACHE_HOME", "/c");
        assert_eq!(found(&[home, cache]), "/c/fusestep/figures.json");
        for ignored in ["", "relative"] {
            let cache = ("XDG_CACHE_HOME", ignored);
            assert_eq!(found(&[home, cache]), "/home/a/.cache/fusestep/figures.json");
        }
        assert_eq!(found(&[cache, (FIGURES_VARIABLE, "none")]), "off");
        assert_eq!(found(&[cache, (FIGURES_VARIABLE, "own.json")]), "own.json");
        assert!(found(&[]).starts_with("figures have no place"));
    }
}
