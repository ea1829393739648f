//! Packages that programs use for one thing bring few others.

use std::collections::BTreeSet;
use std::process::Command;

use crate::root;

/// A package, the most packages of a program that depends on it alone, itself among them, and
/// what must not be one of them.
struct Ceiling {
    package: &'static str,
    most: usize,
    without: &'static [&'static str],
}

/// A pool of threads, which programs choose, and kernels with their seam.
const POOL: &str = "rayon";
const KERNELS: &str = "fusestep-launch";

const CEILINGS: [Ceiling; 13] = [
    Ceiling { package: "fusestep-coalesce", most: 17, without: &[POOL, KERNELS, "serde"] },
    Ceiling { package: "fusestep-collective", most: 29, without: &[POOL, KERNELS] },
    rule("fusestep-adagrad"),
    rule("fusestep-fused-adam"),
    rule("fusestep-fused-sgd"),
    rule("fusestep-lamb"),
    rule("fusestep-lars-momentum"),
    rule("fusestep-lion"),
    rule("fusestep-rmsprop"),
    rule("fusestep-schedule-free"),
    Ceiling { package: "fusestep-schedule", most: 2, without: &[] },
    Ceiling { package: "fusestep-simd", most: 9, without: &[POOL] },
    Ceiling { package: "fusestep-tensor", most: 14, without: &[POOL] },
];

const fn rule(package: &'static str) -> Ceiling {
    Ceiling { package, most: 20, without: &[POOL, "fusestep-planner", "fusestep-cpu"] }
}

/// Names of packages in lines of `name version`, with a mark at those that were named before.
fn named(tree: &str) -> BTreeSet<&str> {
    let lines = tree.lines().map(|line| line.trim_end_matches(" (*)"));
    let versions = lines.map(|line| line.split(" (").next().unwrap_or(line));
    versions.filter(|line| !line.is_empty()).collect()
}

/// Packages of a program that depends on `package` alone, by name and version.
fn brought(package: &str) -> String {
    tree(&["-e", "normal", "-p", package])
}

/// What `cargo tree` lists, a package to a line.
fn tree(arguments: &[&str]) -> String {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["tree", "--offline", "--locked", "--prefix", "none"])
        .args(arguments)
        .current_dir(root())
        .output()
        .expect("cargo starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo lists no packages of {arguments:?}: {error}");
    String::from_utf8(output.stdout).expect("names are text")
}

/// Packages from elsewhere, each with its features.
fn features(tree: &str) -> BTreeSet<&str> {
    let lines = tree.lines().map(|line| line.trim_end_matches(" (*)"));
    lines.filter(|line| !line.is_empty() && !line.starts_with("fusestep")).collect()
}

#[test]
fn the_python_package_is_tested_on_what_the_workspace_has_built() {
    let format = ["-f", "{p} {f}", "-e"];
    let alone = ["normal,build", "-p", "fusestep-python", "-F", "fusestep-python/beside"];
    let own = tree(&[&format[..], &alone].concat());
    let whole = tree(&[&format[..], &["normal,build,dev", "--workspace"]].concat());
    let others = features(&whole);
    let built_again: Vec<_> =
        features(&own).into_iter().filter(|line| !others.contains(line)).collect();
    assert!(
        built_again.is_empty(),
        "feature `beside` of fusestep-python: expected what the workspace has, found {built_again:#?}"
    );
}

#[test]
fn packages_that_are_for_one_thing_bring_few_others() {
    let mut found = Vec::new();
    for Ceiling { package, most, without } in CEILINGS {
        let tree = brought(package);
        let packages = named(&tree);
        if packages.len() > most {
            found.push(format!(
                "{package}: expected at most {most} packages, found {}: {packages:?}",
                packages.len()
            ));
        }
        let is = |name: &str| packages.iter().any(|line| line.split(' ').next() == Some(name));
        found.extend(
            without
                .iter()
                .filter(|name| is(name))
                .map(|name| format!("{package}: expected no {name}, found it")),
        );
    }
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn packages_count_once_whatever_is_behind_their_names() {
    let tree = "a v0.1.0 (/home/a)\nb v1.0.0 (proc-macro)\nc v2.0.0\nc v3.0.0\nc v2.0.0 (*)\n\
                b v1.0.0 (proc-macro) (*)\n";
    assert_eq!(Vec::from_iter(named(tree)), ["a v0.1.0", "b v1.0.0", "c v2.0.0", "c v3.0.0"]);
}
