//! Which package may depend on which.

use std::collections::BTreeMap;

/// One entry of a `[dependencies]` table of any kind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Dependency {
    /// The package's name in the registry or workspace.
    package: String,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Normal,
    Dev,
    Build,
}

/// Layers of the packages, lowest first: normal dependencies go down, never sideways or up. So
/// kernel crates depend neither on each other nor on the planner or a backend, and backends and
/// planner do not know each other.
const LAYERS: [&[&str]; 10] = [
    &["tensor", "simd", "schedule", "kernels", "cuda-emulator"],
    &["launch", "tensor-file", "pictures"],
    &["elementwise", "coalesce"],
    &[
        "fused-adam",
        "fused-sgd",
        "lamb",
        "lars-momentum",
        "lion",
        "adagrad",
        "adamax",
        "nadam",
        "rmsprop",
        "schedule-free",
        "amp",
        "collective",
    ],
    // Below the other engines: ranks of an MPI job that share a machine use it.
    &["collective-processes"],
    &["planner", "cpu", "cuda", "collective-mpi", "collective-nccl"],
    &["checkpoint"],
    &["candle", "models", "testkit"],
    &["fusestep"],
    &["cli", "python", "tests", "benches", "xtask", "fuzz"],
];

/// Packages from elsewhere that only some folders may name, in any kind of dependency; a trailing
/// `*` stands for any rest.
const ONLY_IN: [(&str, &[&str]); 12] = [
    ("cust*", &["crates/cuda"]),
    ("mpi", &["crates/collective-mpi"]),
    ("nccl*", &["crates/collective-nccl"]),
    ("libloading", &["crates/collective-nccl", "crates/python"]),
    ("loom", &["crates/simd", "crates/collective"]),
    ("candle-*", &["crates/candle", "crates/cli", "crates/models"]),
    ("pyo3*", &["crates/python"]),
    ("criterion", &["benches"]),
    ("clap", &["crates/cli"]),
    ("indicatif", &["crates/cli"]),
    ("plotters*", &["crates/pictures"]),
    ("approx", &["tools/testkit", "tests"]),
];

/// Workspaces of their own: programs that depend on us as strangers do, and a peer.
const OUTSIDE: [&str; 2] = ["tests/consumer", "benches/peers/burn"];

/// Whether the folder belongs to another workspace.
pub(crate) fn is_outside(folder: &str) -> bool {
    OUTSIDE.iter().any(|outside| folder.starts_with(outside))
}

/// What is wrong with the manifest of the package in `folder`.
pub(crate) fn violations(folder: &str, manifest: &str) -> Vec<String> {
    let mut found = Vec::new();
    let own = layer(folder.rsplit('/').next().unwrap_or(folder));
    if own.is_none() {
        found.push(format!("{folder}: expected a layer in tests/tidy/dependencies.rs, found none"));
    }
    for dependency in dependencies(manifest) {
        let package = &dependency.package;
        for (name, folders) in ONLY_IN {
            if is_named(name, package) && !folders.contains(&folder) {
                found.push(format!(
                    "{folder}: expected `{package}` only in {folders:?}, found it here"
                ));
            }
        }
        let Some(short) = package.strip_prefix("fusestep-") else {
            continue;
        };
        if let (Some(own), Some(theirs), Kind::Normal) = (own, layer(short), dependency.kind)
            && theirs >= own
        {
            found.push(format!(
                "{folder}: expected dependencies on lower layers only, found `{package}` ({theirs}, own {own})"
            ));
        }
    }
    found
}

/// The layer of a folder's package.
pub(crate) fn layer(short: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&short))
}

fn is_named(pattern: &str, package: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => package.starts_with(start),
        None => package == pattern,
    }
}

/// All dependencies of a manifest, those of targets included; `[workspace.dependencies]` only pins
/// versions and is left out.
fn dependencies(manifest: &str) -> Vec<Dependency> {
    let mut found = BTreeMap::<(String, usize), Dependency>::new();
    let mut table: Option<(Kind, Option<String>)> = None;
    for line in manifest.lines().map(str::trim) {
        if let Some(header) = line.strip_prefix('[') {
            table = table_of(header.trim_end_matches(']'));
            if let Some((kind, Some(name))) = &table {
                found.insert(
                    (name.clone(), *kind as usize),
                    Dependency { package: name.clone(), kind: *kind },
                );
            }
            continue;
        }
        let Some((key, value)) = line.split_once('=').filter(|_| !line.starts_with('#')) else {
            continue;
        };
        let key = key.trim();
        match &table {
            Some((kind, None)) => {
                let name = key.split('.').next().unwrap_or(key).trim_matches('"');
                let renamed = value.split_once("package").map(|(_, rest)| quoted(rest));
                let package = renamed.unwrap_or_else(|| name.to_owned());
                found
                    .insert((name.to_owned(), *kind as usize), Dependency { package, kind: *kind });
            }
            Some((kind, Some(name))) if key == "package" => {
                let package = quoted(value);
                found.insert((name.clone(), *kind as usize), Dependency { package, kind: *kind });
            }
            _ => {}
        }
    }
    found.into_values().collect()
}

/// The kind of dependencies that a table holds, and the package if the table is one package's own.
fn table_of(header: &str) -> Option<(Kind, Option<String>)> {
    let header = match header.strip_prefix("target.") {
        Some(rest) => rest.rsplit_once("'.").or_else(|| rest.split_once('.'))?.1,
        None => header,
    };
    let (table, name) = match header.split_once('.') {
        Some((table, name)) => (table, Some(name.to_owned())),
        None => (header, None),
    };
    let kind = match table {
        "dependencies" => Kind::Normal,
        "dev-dependencies" => Kind::Dev,
        "build-dependencies" => Kind::Build,
        _ => return None,
    };
    Some((kind, name))
}

/// The first quoted text.
fn quoted(text: &str) -> String {
    text.split('"').nth(1).unwrap_or_default().to_owned()
}

#[test]
fn tables_of_every_form_are_read() {
    let manifest = "[package]\nname = \"x\"\n[dependencies]\na.workspace = true\nb = { version = \"1\", package = \"real-b\" }\n\
        # c = \"1\"\n[dev-dependencies.d]\nversion = \"1\"\n[target.'cfg(target_os = \"linux\")'.build-dependencies]\ne = \"1\"\n\
        [workspace.dependencies]\nf = \"1\"\n[features]\ng = []\n";
    let found: Vec<_> = dependencies(manifest).into_iter().map(|d| (d.package, d.kind)).collect();
    let expected =
        [("a", Kind::Normal), ("real-b", Kind::Normal), ("d", Kind::Dev), ("e", Kind::Build)];
    assert_eq!(found, expected.map(|(name, kind)| (name.to_owned(), kind)));
}

#[test]
fn forbidden_dependencies_are_found() {
    let depends = |kind: &str, name: &str| format!("[{kind}]\n{name}.workspace = true\n");
    for (folder, kind, name, expected) in [
        ("crates/fused-adam", "dependencies", "fusestep-launch", 0),
        ("crates/fused-adam", "dependencies", "fusestep-planner", 1),
        ("crates/fused-adam", "dependencies", "fusestep-fused-sgd", 1),
        ("crates/fused-adam", "dependencies", "fusestep-cpu", 1),
        ("crates/planner", "dependencies", "fusestep-cpu", 1),
        ("crates/planner", "dev-dependencies", "fusestep-cpu", 0),
        ("crates/cpu", "dependencies", "fusestep-planner", 1),
        ("crates/cpu", "dependencies", "cust", 1),
        ("crates/cuda", "dependencies", "cust", 0),
        ("crates/planner", "dev-dependencies", "candle-core", 1),
        ("crates/cli", "dependencies", "candle-nn", 0),
        ("crates/simd", "dev-dependencies", "criterion", 1),
        ("benches", "dependencies", "criterion", 0),
        ("tools/xtask", "dependencies", "clap", 1),
        ("crates/planner", "dependencies", "approx", 1),
        ("crates/unheard-of", "dependencies", "serde", 1),
    ] {
        let found = violations(folder, &depends(kind, name));
        assert_eq!(found.len(), expected, "{folder} {kind} {name}: {found:?}");
    }
}
