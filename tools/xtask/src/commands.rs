//! Programs that are run to their end, what they say, and those that cargo builds.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::workspace_root;

/// The cargo that has started this program, in the workspace's root; words with a space between.
pub(crate) fn cargo(words: &str) -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(words.split(' ')).current_dir(workspace_root());
    cargo
}

/// The interpreter that fetches wheels and drives the compiler's library.
pub(crate) fn python() -> Command {
    Command::new("python3")
}

/// Runs a command that prints where this program does. `failed` says what it means if it does not
/// end well.
pub(crate) fn must(command: &mut Command, failed: &str) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let status = command.status();
    let status = status.with_context(|| format!("`{program}` does not start; install it"))?;
    ensure!(status.success(), "{failed}");
    Ok(())
}

/// Runs a command to its end; an exit status other than 0 is an error that carries what it wrote.
pub(crate) fn succeed(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}

/// Like [`succeed`], with standard output and standard error as text.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output =
        command.output().with_context(|| format!("`{program}` does not start; install it"))?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    if !output.status.success() {
        bail!("`{program}` ended with {}\n{}", output.status, text.trim_end());
    }
    Ok(text)
}

/// The platform that the compiler builds for.
pub(crate) fn host() -> Result<String> {
    let version = output(Command::new("rustc").arg("-vV"))?;
    let mut lines = version.lines();
    let host = lines.find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc names no host")?.to_owned())
}

/// A program and its name without cargo's hash.
#[derive(Debug, PartialEq)]
pub(crate) struct Program {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// Whether it is one of tests or benches.
    pub(crate) is_test: bool,
}

/// Has cargo build what a command names, and returns the programs.
pub(crate) fn built(cargo: &mut Command) -> Result<Vec<Program>> {
    let output = cargo
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    ensure!(output.status.success(), "cannot be built: {:?}", cargo.get_args());
    let programs = programs(&String::from_utf8(output.stdout)?);
    ensure!(!programs.is_empty(), "cargo names no program that it built");
    Ok(programs)
}

/// The programs that cargo's messages name, one JSON object a line.
fn programs(messages: &str) -> Vec<Program> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let programs = messages.filter_map(|message| {
        Some(Program {
            name: message["target"]["name"].as_str()?.to_owned(),
            path: message["executable"].as_str()?.into(),
            is_test: message["profile"]["test"] == true,
        })
    });
    programs.collect()
}

/// The program of one target.
pub(crate) fn named<'p>(programs: &'p [Program], name: &str) -> Result<&'p Path> {
    let mut programs = programs.iter();
    let found = programs.find(|program| program.name == name);
    let found = found.with_context(|| format!("cargo built no program `{name}`"))?;
    Ok(&found.path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_s_messages_name_programs() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"fusestep_launch"},"profile":{"test":false},"executable":null}
not json
{"reason":"compiler-artifact","target":{"name":"laws"},"profile":{"test":true},"executable":"/t/laws-1"}
{"reason":"compiler-artifact","target":{"name":"fusestep"},"profile":{"test":false},"executable":"/t/fusestep"}
{"reason":"build-finished","success":true}"#;
        let program = |name: &str, path: &str, is_test| Program {
            name: name.to_owned(),
            path: path.into(),
            is_test,
        };
        let expected =
            [program("laws", "/t/laws-1", true), program("fusestep", "/t/fusestep", false)];
        assert_eq!(programs(messages), expected);
    }
}
