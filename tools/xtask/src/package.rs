//! `package`: the crates as a registry would serve them, and programs outside of the workspace that
//! are built from them and run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::commands::{cargo, must, output};
use crate::{folders, target_folder, workspace_root};

/// The most bytes of a packed crate that crates.io takes.
const MAX_PACKED_BYTES: u64 = 10 << 20;

/// Programs of `tests/consumer`, by package.
const CONSUMERS: [&str; 4] =
    ["consumer-one-kernel", "consumer-facade", "consumer-with-candle", "consumer-json"];

/// Programs of `tests/consumer` that differ by a dependency on us, and the features that it may add
/// to what both stand on, each with its crate.
const PAIRS: [(&str, &str, &[&str]); 2] = [
    // A feature more of what candle stands on would build candle anew.
    ("consumer-candle-alone", "consumer-with-candle", &[]),
    // For programs without the standard library's allocator, and `Result` as a value that `serde`
    // can write.
    (
        "consumer-json-alone",
        "consumer-json",
        &["serde_core/alloc", "serde_core/result", "serde_json/alloc"],
    ),
];

/// A crate that is for publication.
struct Public {
    name: String,
    version: String,
}

impl Public {
    fn stem(&self) -> String {
        format!("{}-{}", self.name, self.version)
    }
}

/// Packs every crate that is not `publish = false`, checks what a registry asks for, and runs the
/// programs of `tests/consumer` on what was packed: with the lock file's candle or a given one.
/// `--semver` compares public items with those of the commit that raised the version instead.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let root = workspace_root();
    let crates = public_crates()?;
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let candle = match arguments[..] {
        [] => None,
        ["--candle", version] => Some(version),
        ["--semver"] => return semver(&root, &crates),
        _ => bail!("expected `package [--candle VERSION | --semver]`, found {arguments:?}"),
    };
    let packed = pack(&crates)?;
    let unpacked = unpack(&packed, &crates)?;
    let consumer = place_consumer(&root, &unpacked, &crates)?;
    for package in candle.iter().flat_map(|_| ["candle-core", "candle-nn"]) {
        let version = candle.unwrap_or_default();
        must(
            cargo(&format!("update -q -p {package} --precise {version}")).current_dir(&consumer),
            &format!("{package} cannot be of version {version}"),
        )?;
    }
    for (alone, beside, additive) in PAIRS {
        let found = added(&features(&consumer, alone)?, &features(&consumer, beside)?, additive);
        ensure!(found.is_empty(), "{beside} changes crates that {alone} has\n{}", found.join("\n"));
    }
    // A stranger's first build is one without `--release`, and it takes a third of the time.
    for program in CONSUMERS {
        must(
            cargo(&format!("run -q -p {program}"))
                .current_dir(&consumer)
                .env("CARGO_PROFILE_DEV_DEBUG", "none")
                .env("CARGO_TARGET_DIR", target_folder().join("consumer-build")),
            &format!("{program} does not run on the packed crates"),
        )?;
    }
    Ok(())
}

/// Names crates to cargo.
fn named(crates: &[Public]) -> impl Iterator<Item = &str> {
    crates.iter().flat_map(|public| ["-p", &public.name])
}

/// Public items beside those of the commit in which the crates took their version; nothing has been
/// released that they could be compared with.
fn semver(root: &Path, crates: &[Public]) -> Result<()> {
    let version = &crates.first().context("no public crates")?.version;
    let found = Command::new("git")
        .args(["log", "--format=%H", "--reverse"])
        .arg(format!("-Sversion = \"{version}\""))
        .args(["--", "Cargo.toml"])
        .current_dir(root)
        .output()?;
    let commits = String::from_utf8(found.stdout)?;
    let first = commits.lines().next().context("no commit has set the version")?;
    let check = format!("semver-checks --release-type minor --baseline-rev {first}");
    must(cargo(&check).args(named(crates)), "public items have changed")
}

/// The crates for publication, and an error that names every one that a registry would refuse.
fn public_crates() -> Result<Vec<Public>> {
    let found = cargo("metadata --no-deps --format-version 1").output()?;
    ensure!(found.status.success(), "cargo metadata fails");
    let metadata: Value = serde_json::from_slice(&found.stdout)?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    let mut missing = Vec::new();
    let mut crates = Vec::new();
    for package in packages.iter().filter(|package| is_public(package)) {
        let text = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
        let name = text("name");
        missing.extend(gaps(package).map(|gap| format!("{name}: {gap}")));
        crates.push(Public { name, version: text("version") });
    }
    ensure!(missing.is_empty(), "a registry would refuse\n{}", missing.join("\n"));
    Ok(crates)
}

/// Whether `publish` is not `false`, which `cargo metadata` gives as an empty list.
pub(crate) fn is_public(package: &Value) -> bool {
    package["publish"].as_array().is_none_or(|to| !to.is_empty())
}

/// What a package lacks.
pub(crate) fn gaps(package: &Value) -> impl Iterator<Item = String> {
    let texts = ["description", "license", "repository", "readme"]
        .into_iter()
        .filter(|key| package[key].as_str().is_none_or(str::is_empty))
        .map(|key| format!("expected `{key}`, found none"));
    let lists = ["keywords", "categories"].into_iter().filter_map(|key| {
        let count = package[key].as_array().map_or(0, Vec::len);
        (!(1..=5).contains(&count)).then(|| format!("expected 1 to 5 `{key}`, found {count}"))
    });
    texts.chain(lists).collect::<Vec<_>>().into_iter()
}

/// Packs the crates and returns the folder of their files; prints the size of each.
fn pack(crates: &[Public]) -> Result<PathBuf> {
    // What is not committed is packed too, so that a change can be tried before it is one.
    let mut command = cargo("package -q --no-verify --allow-dirty");
    must(command.args(named(crates)), "cargo package fails")?;
    let folder = target_folder().join("package");
    let mut too_large = Vec::new();
    for public in crates {
        let len_bytes = fs::metadata(folder.join(public.stem() + ".crate"))?.len();
        println!("{:>9} bytes  {}", len_bytes, public.stem());
        if len_bytes > MAX_PACKED_BYTES {
            too_large.push(public.stem());
        }
    }
    if !too_large.is_empty() {
        bail!("expected at most {MAX_PACKED_BYTES} bytes, found more in {too_large:?}");
    }
    Ok(folder)
}

/// Unpacks every crate into an empty folder and returns it.
fn unpack(packed: &Path, crates: &[Public]) -> Result<PathBuf> {
    let folder = target_folder().join("unpacked");
    folders::empty(&folder)?;
    for public in crates {
        let mut tar = Command::new("tar");
        tar.arg("-xzf").arg(packed.join(public.stem() + ".crate")).arg("-C").arg(&folder);
        must(&mut tar, &format!("{} does not unpack", public.stem()))?;
        for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
            let path = folder.join(public.stem()).join(licence);
            ensure!(path.is_file(), "expected {}, found no file", path.display());
        }
    }
    Ok(folder)
}

/// Copies `tests/consumer` out of the workspace's reach, with the unpacked crates in the place of
/// the registry's and the workspace's versions of everything else.
fn place_consumer(root: &Path, unpacked: &Path, crates: &[Public]) -> Result<PathBuf> {
    let folder = target_folder().join("consumer");
    folders::copy(&root.join("tests/consumer"), &folder)?;
    fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock"))?;
    let manifest = folder.join("Cargo.toml");
    let mut text = fs::read_to_string(&manifest)?;
    text.push_str("\n[patch.crates-io]\n");
    for public in crates {
        let path = unpacked.join(public.stem());
        text.push_str(&format!("{} = {{ path = {path:?} }}\n", public.name));
    }
    fs::write(manifest, text)?;
    Ok(folder)
}

/// A crate of a program, by name and version, with its features.
type Features = BTreeMap<String, BTreeSet<String>>;

/// The crates that a program is built from.
fn features(consumer: &Path, program: &str) -> Result<Features> {
    let mut tree =
        cargo(&format!("tree -p {program} -e normal,build --prefix none -f {{p}};{{f}}"));
    let found = output(tree.current_dir(consumer).args(["--quiet"]))?;
    Ok(parse_features(&found))
}

/// Reads lines of `name version;feature,feature`, several for a crate that is built several times.
fn parse_features(tree: &str) -> Features {
    let mut crates = Features::new();
    for (name, features) in tree.lines().filter_map(|line| line.split_once(';')) {
        let features = features.trim_end_matches(" (*)").split(',');
        let features = features.filter(|feature| !feature.is_empty());
        crates.entry(name.to_owned()).or_default().extend(features.map(str::to_owned));
    }
    crates
}

/// Features that a program has with us and not alone, but for those of `additive`, which add items
/// only.
fn added(alone: &Features, beside: &Features, additive: &[&str]) -> Vec<String> {
    let shared = alone.iter().filter_map(|(name, own)| Some((name, own, beside.get(name)?)));
    let lines = shared.filter_map(|(name, own, beside)| {
        let of = name.split(' ').next().unwrap_or(name);
        let is_more = |more: &&String| !additive.contains(&&*format!("{of}/{more}"));
        let more = beside.difference(own).filter(is_more);
        let more: Vec<&str> = more.map(String::as_str).collect();
        (!more.is_empty()).then(|| format!("{name}: expected no more features, found {more:?}"))
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn features_that_a_program_has_only_with_us_are_found() {
        let alone = parse_features(
            "json v0.1.0 (/a);\nserde v1.0.2;default,std\nserde v1.0.2;default,std (*)\n",
        );
        let beside = parse_features("serde v1.0.2;alloc,default,rc,std\nours v0.2.0;order\n");
        let found = added(&alone, &beside, &["serde/alloc", "json/rc"]);
        assert_eq!(found, [r#"serde v1.0.2: expected no more features, found ["rc"]"#]);
        assert!(added(&alone, &beside, &["serde/alloc", "serde/rc"]).is_empty());
        assert!(added(&beside, &alone, &[]).is_empty());
    }

    #[test]
    fn features_of_all_builds_of_a_crate_count() {
        let alone = parse_features("libc v0.2.1;std\n");
        let beside = parse_features("libc v0.2.1;extra,std\nlibc v0.2.1;std\n");
        let found = added(&alone, &beside, &[]);
        assert_eq!(found, [r#"libc v0.2.1: expected no more features, found ["extra"]"#]);
    }

    #[test]
    fn what_a_registry_asks_for_is_looked_for() {
        let whole = json!({
            "description": "d", "license": "MIT", "repository": "r", "readme": "README.md",
            "keywords": ["k"], "categories": ["c"], "publish": null,
        });
        assert!(is_public(&whole));
        assert_eq!(gaps(&whole).count(), 0);
        let mut bare = whole.clone();
        bare["readme"] = Value::Null;
        bare["keywords"] = json!(["a", "b", "c", "d", "e", "f"]);
        bare["publish"] = json!([]);
        assert!(!is_public(&bare));
        let found: Vec<_> = gaps(&bare).collect();
        let expected = ["expected `readme`, found none", "expected 1 to 5 `keywords`, found 6"];
        assert_eq!(found, expected);
    }
}
