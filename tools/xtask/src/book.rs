//! `book`: the pages of docs/ under one menu, with every link and anchor checked.

use anyhow::{Result, ensure};

use crate::commands::must;
use crate::environment::Environment;
use crate::{target_folder, workspace_root};

/// Builds the book into `target/book`. A link that leads nowhere, a heading that is not there and a
/// page outside of the menu are errors.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    ensure!(arguments.is_empty(), "expected `book`, found {arguments:?}");
    let root = workspace_root();
    let environment = Environment::new("book-tools")?;
    let requirements = root.join("tools/xtask/book/requirements.txt");
    environment.install(&["-r".as_ref(), requirements.as_os_str()])?;
    let book = target_folder().join("book");
    // Not with `--quiet`, with which warnings do not count.
    must(
        environment
            .python()
            .args(["-m", "mkdocs", "build", "--strict", "--site-dir"])
            .arg(&book)
            .current_dir(root),
        "the book does not build",
    )?;
    println!("{}", book.join("index.html").display());
    Ok(())
}
