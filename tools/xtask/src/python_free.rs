//! `python --free-threaded`: the extension module for a free-threaded CPython, 3.14t. Such an
//! interpreter loads no module of the stable ABI, which the wheel has.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::ErrorKind;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::commands::{cargo, must, succeed};
use crate::python::test_bare;
use crate::target_folder;

/// The interpreter that is looked for, unless PyO3's own variable names another.
const INTERPRETER: &str = "python3.14t";
const NAMED_BY: &str = "PYO3_PYTHON";

/// What PyO3 would hear from the interpreter, for a build without one.
const DESCRIBED: &str = "implementation=CPython\nversion=3.14\nshared=true\nabi3=false\n\
                         pointer_width=64\nbuild_flags=Py_GIL_DISABLED\n\
                         suppress_build_script_link_lines=true\n";

/// What the interpreter is asked.
const ASKED: &str = "import sysconfig; \
                     print(*map(sysconfig.get_config_var, ('Py_GIL_DISABLED', 'EXT_SUFFIX')))";

/// Runs the tests of the seam in a free-threaded interpreter. Where none is there, it says so, and
/// the module is compiled for one and not run.
pub(crate) fn run() -> Result<()> {
    let named = env::var_os(NAMED_BY);
    let interpreter = named.clone().unwrap_or_else(|| INTERPRETER.into());
    let Some(said) = asked(&interpreter, named.is_some())? else {
        return compile();
    };
    let ending = ending_of(&said)
        .with_context(|| format!("the interpreter is {}", interpreter.display()))?;
    let folder = folder();
    must(
        cargo("build --release -q -p fusestep-python")
            .arg("--target-dir")
            .arg(&folder)
            .env(NAMED_BY, &interpreter),
        "the extension module does not build for a free-threaded interpreter",
    )?;
    let library = folder.join("release/lib_fusestep.so");
    let module = format!("_fusestep{ending}");
    test_bare(&mut Command::new(&interpreter), "free-threaded", &library, &module, "bare")
}

/// Where it is built: other builds would be compiled anew behind one for another interpreter.
fn folder() -> std::path::PathBuf {
    target_folder().join("free-threaded")
}

/// What the interpreter says; `None` if nobody has named it and it is not there.
fn asked(interpreter: &OsString, is_named: bool) -> Result<Option<String>> {
    match Command::new(interpreter).args(["-c", ASKED]).output() {
        Ok(output) if output.status.success() => {
            Ok(Some(String::from_utf8_lossy(&output.stdout).into_owned()))
        }
        Ok(output) => bail!("{}: ended with {}", interpreter.display(), output.status),
        Err(error) if error.kind() == ErrorKind::NotFound && !is_named => Ok(None),
        Err(error) => {
            Err(error).with_context(|| format!("{NAMED_BY} of {}", interpreter.display()))
        }
    }
}

/// The ending of modules of an interpreter that has said this.
fn ending_of(said: &str) -> Result<&str> {
    let mut words = said.split_whitespace();
    let disabled = words.next().unwrap_or("nothing");
    ensure!(
        disabled == "1",
        "{NAMED_BY}: expected a free-threaded interpreter, whose Py_GIL_DISABLED is 1, found \
         {disabled}; name one such as {INTERPRETER}"
    );
    words.next().context("expected the ending of modules, found none")
}

/// Compiles the module for an interpreter that is not there.
fn compile() -> Result<()> {
    let folder = folder();
    fs::create_dir_all(&folder)?;
    let described = folder.join("interpreter.txt");
    fs::write(&described, DESCRIBED)?;
    let mut check = cargo("check -q -p fusestep-python");
    check.env("PYO3_CONFIG_FILE", &described).env_remove(NAMED_BY);
    succeed(check.args([OsStr::new("--target-dir"), folder.as_os_str()]))?;
    println!(
        "compiled for CPython 3.14t; tests skipped: expected {INTERPRETER} on the path or an \
         interpreter in {NAMED_BY}, found none"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interpreter_with_a_lock_is_refused() {
        let ending = ".cpython-314t-x86_64-linux-gnu.so";
        assert_eq!(ending_of(&format!("1 {ending}\n")).unwrap(), ending);
        for (said, found) in [("0 .so", "found 0"), ("None .so", "found None"), ("", "nothing")] {
            let error = ending_of(said).unwrap_err().to_string();
            assert!(error.contains(found) && error.contains(INTERPRETER), "{error}");
        }
        assert!(ending_of("1").is_err());
    }
}
