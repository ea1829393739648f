//! `pages`: the programs that pages show, typed into empty folders and run.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::commands::{cargo, output};
use crate::environment::Environment;
use crate::fences::{Fence, fences, not_printed};
use crate::{folders, python, target_folder, workspace_root};

/// Where a page's reader has the clone.
const CLONE: &str = "\"../fusestep/";

/// Folders with pages whose programs run, beside README.
const FOLDERS: [&str; 3] = ["docs/start", "docs/guides", "docs/reference"];

/// What a program prints that is not there.
const NO_PYTORCH: &str = "not run, as `cargo xtask python` has not put PyTorch there";

/// Runs every block `rust run` with the dependencies of the block `toml` above it, and every block
/// `python run` where PyTorch is. A block `text` below `<!-- printed -->` has lines that the
/// program before it prints.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    ensure!(arguments.is_empty(), "expected `pages`, found {arguments:?}");
    let root = workspace_root();
    let folder = target_folder().join("pages");
    folders::empty(&folder)?;
    let mut failed = Vec::new();
    for page in pages(&root)? {
        let path = root.join(&page);
        let text = fs::read_to_string(&path).with_context(|| page.clone())?;
        for program in programs(&text) {
            let place = format!("{page}:{}", program.block.line);
            let stem = path.file_stem().unwrap_or_default().to_string_lossy().to_lowercase();
            let folder = folder.join(format!("{stem}-{}", program.block.line));
            match program.run(&root, &folder) {
                Ok(end) => println!("{place}: {end}"),
                Err(error) => failed.push(format!("{place}: {error:#}")),
            }
        }
    }
    ensure!(failed.is_empty(), "programs of pages fail\n{}", failed.join("\n"));
    Ok(())
}

/// The pages, relative to the workspace.
fn pages(root: &Path) -> Result<Vec<String>> {
    let mut pages = vec!["README.md".to_owned()];
    for folder in FOLDERS {
        if root.join(folder).is_dir() {
            let files = folders::files_below(&root.join(folder))?.into_iter();
            let files = files.filter(|path| path.extension().is_some_and(|found| found == "md"));
            let relative = files.filter_map(|path| Some(path.strip_prefix(root).ok()?.to_owned()));
            pages.extend(relative.map(|path: PathBuf| path.display().to_string()));
        }
    }
    pages.sort();
    Ok(pages)
}

/// A program of a page.
struct Program<'p> {
    block: Fence<'p>,
    dependencies: Option<String>,
    printed: Option<Fence<'p>>,
}

/// The programs of a page, in order.
fn programs(page: &str) -> Vec<Program<'_>> {
    let (mut found, mut dependencies) = (Vec::<Program>::new(), None);
    for block in fences(page) {
        match block.info {
            "toml" => dependencies = Some(text(&block)),
            "rust run" | "python run" => {
                let dependencies = dependencies.clone();
                found.push(Program { block, dependencies, printed: None });
            }
            "text" if block.is("printed") => {
                if let Some(program) = found.last_mut() {
                    program.printed = Some(block);
                }
            }
            _ => {}
        }
    }
    found
}

impl Program<'_> {
    /// Types the program into a folder, runs it there and says how it ended.
    fn run(&self, root: &Path, folder: &Path) -> Result<&'static str> {
        fs::create_dir_all(folder)?;
        let said = if self.block.info == "rust run" {
            let dependencies = self.dependencies.as_ref();
            let dependencies = dependencies.context("expected a block `toml` above, found none")?;
            fs::write(folder.join("Cargo.toml"), manifest(dependencies, root)?)?;
            fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock"))?;
            fs::create_dir_all(folder.join("src"))?;
            fs::write(folder.join("src/main.rs"), text(&self.block))?;
            // In the folder of the programs of `package`, which have built the same of candle.
            let mut program = cargo("run -q");
            output(
                program
                    .current_dir(folder)
                    .env("CARGO_PROFILE_DEV_DEBUG", "none")
                    .env("CARGO_TARGET_DIR", target_folder().join("consumer-build")),
            )?
        } else {
            let environment = Environment::there(python::BESIDE_PYTORCH);
            let asked = ["-c", "import torch, fusestep"];
            let has_both = environment.has_interpreter()
                && environment.python().args(asked).current_dir(folder).output()?.status.success();
            if !has_both {
                return Ok(NO_PYTORCH);
            }
            fs::write(folder.join("program.py"), text(&self.block))?;
            output(environment.python().arg("program.py").current_dir(folder))?
        };
        let printed = self.printed.as_ref();
        let missing = printed.and_then(|block| not_printed(&block.lines, &said));
        ensure!(missing.is_none(), "expected a line {:?}, found\n{said}", missing.unwrap_or(""));
        Ok("ran")
    }
}

/// What stands between the fences.
fn text(block: &Fence) -> String {
    block.lines.iter().flat_map(|line| [line, "\n"]).collect()
}

/// The manifest of a program, with our crates from the workspace: where the page has the path of a
/// clone, and where it has a version.
fn manifest(dependencies: &str, root: &Path) -> Result<String> {
    let mut manifest = String::new();
    if !dependencies.contains("[package]") {
        manifest
            .push_str("[package]\nname = \"program\"\nversion = \"0.0.0\"\nedition = \"2024\"\n");
    }
    let root = root.display();
    for line in dependencies.lines() {
        let line = line.replace(CLONE, &format!("\"{root}/"));
        let ours = line.split_once(" = ").filter(|(name, _)| name.starts_with("fusestep"));
        let Some((name, value)) = ours.filter(|(_, value)| !value.contains("path")) else {
            manifest.push_str(&format!("{line}\n"));
            continue;
        };
        let folder = name.strip_prefix("fusestep-").unwrap_or(name);
        let path = format!("path = \"{root}/crates/{folder}\"");
        let table = value.strip_prefix('{').and_then(|value| value.strip_suffix('}'));
        let value = table.map_or_else(
            || path.clone(),
            |table| {
                let others = table.split(", ").filter(|part| !part.trim().starts_with("version"));
                others.fold(path.clone(), |all, part| format!("{all}, {}", part.trim()))
            },
        );
        manifest.push_str(&format!("{name} = {{ {value} }}\n"));
    }
    ensure!(manifest.contains("[dependencies]"), "expected `[dependencies]`, found none");
    // A workspace of its own: it lies below ours.
    Ok(manifest + "\n[workspace]\n")
}

#[test]
fn manifests_take_our_crates_from_the_workspace() {
    let page = "[dependencies]\ncandle-nn = \"0.11\"\nfusestep = \"0.2\"\nfusestep-lion = { version = \"0.2\", features = [\"x\"] }\nfusestep-amp = { path = \"../fusestep/crates/amp\" }\n";
    let found = manifest(page, Path::new("/r")).unwrap();
    let (_, found) = found.split_once("[dependencies]\n").unwrap();
    assert_eq!(
        found,
        "candle-nn = \"0.11\"\nfusestep = { path = \"/r/crates/fusestep\" }\nfusestep-lion = { path = \"/r/crates/lion\", features = [\"x\"] }\nfusestep-amp = { path = \"/r/crates/amp\" }\n\n[workspace]\n"
    );
    assert!(manifest("[package]\n", Path::new("/r")).is_err());
}

#[test]
fn programs_have_the_dependencies_above_and_the_output_below() {
    let page =
        "```toml\na\n```\n```rust run\nb\n```\n<!-- printed -->\n```text\nc\n```\n```rust\n```\n";
    let found = programs(page);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].dependencies.as_deref(), Some("a\n"));
    assert_eq!(found[0].printed.as_ref().map(|block| block.line), Some(8));
}
