//! Workflows of the code host: each is a thin call of a command that runs anywhere.

use std::fs;

use serde_yaml_ng::Value;

use crate::{USAGE, workspace_root};

/// What is wrong with a workflow.
fn violations(text: &str) -> Vec<String> {
    let workflow: Value = match serde_yaml_ng::from_str(text) {
        Ok(workflow) => workflow,
        Err(error) => return vec![format!("expected a document of YAML, found {error}")],
    };
    let mut found = Vec::new();
    for key in ["name", "on", "permissions", "jobs"] {
        if workflow[key].is_null() {
            found.push(format!("expected `{key}`, found none"));
        }
    }
    let jobs = workflow["jobs"].as_mapping().into_iter().flatten();
    let mut commands = 0;
    for (job, body) in jobs {
        let job = job.as_str().unwrap_or_default();
        for key in ["runs-on", "timeout-minutes", "steps"] {
            if body[key].is_null() {
                found.push(format!("{job}: expected `{key}`, found none"));
            }
        }
        for step in body["steps"].as_sequence().into_iter().flatten() {
            commands += usize::from(step["run"].as_str().is_some());
            found.extend(wrong_step(step).map(|wrong| format!("{job}: {wrong}")));
        }
    }
    if commands == 0 {
        found.push("expected a step that runs a command, found none".to_owned());
    }
    found
}

/// A step that neither uses a released action nor runs one of our commands.
fn wrong_step(step: &Value) -> Option<String> {
    match (step["uses"].as_str(), step["run"].as_str()) {
        (Some(action), None) => {
            let is_released =
                action.split_once("@v").is_some_and(|(_, version)| !version.is_empty());
            (!is_released).then(|| format!("expected an action `NAME@vN`, found {action:?}"))
        }
        (None, Some(".ci/run")) => None,
        (None, Some(command)) => {
            let ours = command.strip_prefix("cargo xtask ").and_then(|rest| rest.split(' ').next());
            let is_ours = ours.is_some_and(|name| crate::help_of(name).is_ok());
            (!is_ours).then(|| {
                let commands = USAGE.matches("cargo xtask ").count();
                format!("expected `.ci/run` or one of {commands} `cargo xtask`s, found {command:?}")
            })
        }
        _ => Some("expected `uses` or `run`, found none or both".to_owned()),
    }
}

#[test]
fn workflows_call_our_commands() {
    let folder = workspace_root().join(".github/workflows");
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let found = violations(&fs::read_to_string(&path).unwrap());
        assert!(found.is_empty(), "{}: {}", path.display(), found.join("\n"));
        names.push(path.file_name().unwrap().to_string_lossy().into_owned());
    }
    names.sort();
    assert_eq!(names, ["book.yml", "tests.yml", "wheels.yml"]);
}

#[test]
fn workflows_that_would_not_run_are_found() {
    const GOOD: &str = "name: a\non: push\npermissions: {}\njobs:\n  one:\n    runs-on: b\n    \
                        timeout-minutes: 1\n    steps:\n      - uses: actions/checkout@v4\n      - run: .ci/run\n";
    assert_eq!(violations(GOOD), Vec::<String>::new());
    for (from, to, expected) in [
        ("name: a", "name: [a", "expected a document of YAML"),
        ("on: push\n", "", "expected `on`, found none"),
        ("    runs-on: b\n", "", "one: expected `runs-on`"),
        ("@v4", "@main", "one: expected an action `NAME@vN`, found \"actions/checkout@main\""),
        (".ci/run", "cargo xtask bok", "found \"cargo xtask bok\""),
        ("      - run: .ci/run\n", "", "expected a step that runs a command"),
        ("run: .ci/run", "if: x", "one: expected `uses` or `run`"),
    ] {
        let found = violations(&GOOD.replace(from, to)).join("\n");
        assert!(found.contains(expected), "{to}: {found}");
    }
}
