//! The rules of the house, read from the workspace's own files.

use std::path::{Path, PathBuf};

#[path = "tidy/ceilings.rs"]
mod ceilings;
#[path = "tidy/dependencies.rs"]
mod dependencies;
#[path = "tidy/documents.rs"]
mod documents;
#[path = "tidy/features.rs"]
mod features;
#[path = "tidy/imports.rs"]
mod imports;
#[path = "tidy/lengths.rs"]
mod lengths;
#[path = "tidy/methods.rs"]
mod methods;
#[path = "tidy/prose.rs"]
mod prose;
#[path = "tidy/sentences.rs"]
mod sentences;
#[path = "tidy/snippets.rs"]
mod snippets;
#[path = "tidy/source.rs"]
mod source;
#[path = "tidy/stems.rs"]
mod stems;
#[path = "tidy/unsafety.rs"]
mod unsafety;
#[path = "tidy/weight.rs"]
mod weight;
#[path = "tidy/widths.rs"]
mod widths;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Paths of all files, relative to the root with `/`; build output and hidden folders are left out.
fn files() -> Vec<String> {
    let mut found = Vec::new();
    walk(&root(), "", &mut found);
    assert!(found.len() > 50, "the workspace lies at {}", root().display());
    found.sort();
    found
}

fn walk(folder: &Path, relative: &str, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name.starts_with('.') || name == "target" {
            continue;
        }
        let path = format!("{relative}{name}");
        if entry.file_type().unwrap().is_dir() {
            walk(&entry.path(), &format!("{path}/"), found)
        } else {
            found.push(path)
        }
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Requires that no file with one of these endings violates the rule.
fn require(endings: &[&str], rule: impl Fn(&str, &str) -> Vec<String>) {
    let all = files();
    let matching = all.iter().filter(|path| endings.iter().any(|ending| path.ends_with(ending)));
    let found: Vec<String> = matching.flat_map(|path| rule(path, &read(path))).collect();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn dependencies_go_down_and_stay_where_they_belong() {
    require(&["/Cargo.toml"], |path, text| {
        let folder = path.trim_end_matches("/Cargo.toml");
        if dependencies::is_outside(folder) {
            return Vec::new();
        }
        dependencies::violations(folder, text)
    });
}

#[test]
fn no_library_turns_on_what_changes_a_user_s_program() {
    require(&["Cargo.toml"], |path, text| {
        let folder = path.trim_end_matches("Cargo.toml").trim_end_matches('/');
        if dependencies::is_outside(folder) {
            return Vec::new();
        }
        features::violations(folder, text)
    });
}

#[test]
fn pages_tell_the_layers_counts_and_commands_of_the_code() {
    let architecture = read("docs/ARCHITECTURE.md");
    let (_, map) = architecture.split_once("## Map").unwrap();
    let map = map.split("\n## ").next().unwrap();
    let mut found = documents::wrong_layers("docs/ARCHITECTURE.md", map, &dependencies::layer);
    let all = files();
    let ptx = all.iter().filter(|path| path.starts_with("kernels/ptx/") && path.ends_with(".ptx"));
    let entries = ptx.map(|path| read(path).matches(".entry").count()).sum();
    for (page, word) in [("kernels/README.md", "has"), ("docs/gpu.md", "all")] {
        found.extend(documents::wrong_counts(page, &read(page), word, entries));
    }
    let main = read("crates/cli/src/main.rs");
    let (_, commands) = main.split_once("enum Command {\n").unwrap();
    let commands = commands.split("\n}").next().unwrap().lines().filter_map(|line| {
        let (name, _) = line.trim().split_once('(').filter(|_| !line.contains("//"))?;
        Some(name.to_lowercase())
    });
    let of_program = map.lines().find(|line| line.contains("the program `fusestep`")).unwrap();
    for command in commands {
        if !of_program.contains(&command) {
            found.push(format!("docs/ARCHITECTURE.md: expected the command {command}, found none"));
        }
    }
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn readers_find_every_page() {
    let (readme, overview) = (read("README.md"), read("docs/index.md"));
    let all = files();
    let pages = all.iter().filter_map(|path| path.strip_prefix("docs/"));
    let mut found = Vec::new();
    for page in pages.filter(|page| page.ends_with(".md") && *page != "index.md") {
        if !overview.contains(&format!("]({page})")) {
            found.push(format!("docs/index.md: expected a link to {page}, found none"));
        }
        // Guides are too many for README, which leads to the overview.
        if !page.starts_with("guides/") && !readme.contains(&format!("](docs/{page})")) {
            found.push(format!("README.md: expected a link to docs/{page}, found none"));
        }
    }
    assert!(readme.contains("](docs/index.md)"), "README.md: expected a link to docs/index.md");
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn pages_for_newcomers_have_short_sentences() {
    require(&[".md"], |path, text| {
        let for_newcomers = prose::FOLDERS.iter().any(|folder| path.starts_with(folder));
        if for_newcomers { prose::violations(path, text) } else { Vec::new() }
    });
    require(&["README.md"], prose::long_first_screen);
}

#[test]
fn unsafe_code_is_confined_and_explained() {
    require(&[".rs"], unsafety::violations);
}

#[test]
fn lines_are_at_most_100_columns_wide() {
    require(&[".rs"], widths::violations);
    require(&[".cu", ".cuh", ".hpp", ".cpp"], widths::violations_of_comments);
    require(&[".md"], widths::violations_of_prose);
}

#[test]
fn what_pages_name_is_there() {
    let exists = |path: &str| root().join(path).exists();
    require(&[".md"], |path, text| documents::dead_links(path, text, &exists));
    let sources: Vec<String> = files()
        .into_iter()
        .filter(|path| {
            let endings = [".rs", ".cu", ".cuh", ".hpp", ".cpp", ".py", ".toml"];
            // That one names what is not there.
            endings.iter().any(|ending| path.ends_with(ending)) && !path.ends_with("documents.rs")
        })
        .map(|path| read(&path))
        .collect();
    let words = sources.iter().flat_map(|text| documents::words(text));
    let words = words.collect();
    require(&[".md"], |path, text| documents::unknown_names(path, text, &words));
}

#[test]
fn code_on_the_first_pages_runs() {
    let sources = snippets::RUN.map(read);
    let mut found = snippets::not_run("README.md", &read("README.md"), &sources);
    for page in files().iter().filter(|path| path.starts_with("docs/start/")) {
        let (text, mut sources) = (read(page), sources.to_vec());
        sources.extend(snippets::programs(&text));
        found.extend(snippets::not_run(page, &text, &sources));
    }
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn every_example_is_on_the_page_of_examples() {
    let page = read("docs/EXAMPLES.md");
    let is_program = |path: &&String| {
        let parts: Vec<&str> = path.split('/').collect();
        matches!(parts[..], ["crates", _, "examples", name] if name.ends_with(".rs") || name.ends_with(".py"))
    };
    let all = files();
    let left_out: Vec<&String> = all
        .iter()
        .filter(is_program)
        .filter(|path| !page.contains(&format!("](../{path})")))
        .collect();
    assert!(
        left_out.is_empty(),
        "docs/EXAMPLES.md: expected all examples, found none of {left_out:?}"
    );
}

#[test]
fn files_and_functions_are_short() {
    require(&[".rs", ".cu", ".cuh", ".hpp", ".cpp"], lengths::violations);
}

#[test]
fn a_type_has_its_methods_in_few_files() {
    let paths = files();
    let sources = paths.iter().filter(|path| path.ends_with(".rs"));
    let sources: Vec<(&str, String)> = sources.map(|path| (path.as_str(), read(path))).collect();
    let sources = sources.iter().map(|(path, text)| (*path, text.as_str()));
    let found = methods::scattered(sources);
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn numbers_of_the_house_stay_below_their_ceilings() {
    let paths = files();
    let product = paths.iter().filter(|path| ceilings::is_product(path));
    let product: Vec<(&str, String)> = product.map(|path| (path.as_str(), read(path))).collect();
    let texts = product.iter().map(|(path, text)| (*path, ceilings::without_tests(text)));
    let found = ceilings::violations(&texts.collect::<Vec<_>>());
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
    require(&["/mod.rs"], ceilings::violations_of_room);
}

#[test]
fn branches_and_comments_are_plain() {
    require(&[".rs", ".cu", ".cuh", ".hpp", ".cpp"], sentences::violations);
}

#[test]
fn every_kernel_has_all_its_parts() {
    let all = files();
    let docs = std::fs::read_to_string(root().join("docs/kernels.md")).unwrap_or_default();
    let kernels = all.iter().filter_map(|path| {
        let stem = path.strip_prefix("kernels/")?.strip_suffix(".cu")?;
        (!stem.contains('/')).then_some(stem)
    });
    let exists = |path: &str| all.iter().any(|found| found == path);
    let found: Vec<String> =
        kernels.flat_map(|stem| stems::violations(stem, &exists, &docs)).collect();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn every_element_wise_rule_has_the_same_files() {
    let all = files();
    let folders = all.iter().filter_map(|path| path.strip_suffix("/src/rule.rs"));
    let rules: Vec<&str> = folders.filter(|&folder| folder != "crates/launch").collect();
    assert!(rules.len() >= 5, "{rules:?}");
    for folder in rules {
        let found: Vec<&str> = all
            .iter()
            .filter_map(|path| path.strip_prefix(folder)?.strip_prefix('/'))
            .filter(|path| !path.starts_with("examples/") && !path.starts_with("tests/"))
            .collect();
        let mut expected = stems::RULE.to_vec();
        // A rule that says how its state is coded has an entry for slices of codes.
        if read(&format!("{folder}/src/rule.rs")).contains("const CODINGS") {
            expected.push(stems::CODED);
            expected.sort_unstable();
        }
        assert_eq!(found, expected, "{folder}");
    }
}
