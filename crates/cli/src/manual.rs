//! `fusestep completions` and `fusestep man`: the command line as shells and `man` read it.

use anyhow::Context;
use clap::Args;
use clap_complete::{Shell, generate};
use clap_mangen::Man;

use crate::command_line::command;
use crate::output::print;

/// Flags of `completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Flags of `man`.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// A subcommand, such as `train`; without one the page of the whole command
    subcommand: Option<String>,
}

/// Prints the script of a shell.
pub(crate) fn complete(args: &CompletionsArgs) -> anyhow::Result<()> {
    let mut script = Vec::new();
    generate(args.shell, &mut command(&[]), "fusestep", &mut script);
    print(std::str::from_utf8(&script).context("cannot form the script")?)
}

/// Prints a page in the form that `man` reads.
pub(crate) fn man(args: &ManArgs) -> anyhow::Result<()> {
    let mut whole = command(&[]);
    whole.build();
    let page = match &args.subcommand {
        None => whole,
        Some(name) => {
            let names: Vec<&str> = whole.get_subcommands().map(|found| found.get_name()).collect();
            let found = whole.find_subcommand(name).cloned();
            let expected = || format!("man: expected one of {}, found `{name}`", names.join(", "));
            // Named as `man fusestep-train` looks for it.
            found.with_context(expected)?.display_name(format!("fusestep-{name}"))
        }
    };
    let mut text = Vec::new();
    Man::new(page).render(&mut text).context("cannot form the page")?;
    print(std::str::from_utf8(&text).context("cannot form the page")?)
}
