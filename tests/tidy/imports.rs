//! Imports between the modules of a crate, and the circles that they close.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::{code_only, words};

/// For each module of a crate the modules that it imports; the crate's root is named "".
pub(crate) type Graph = BTreeMap<String, BTreeSet<String>>;

/// The module of a file below `src`.
pub(crate) fn module(file: &str) -> String {
    let name = file.trim_end_matches(".rs").replace('/', "::");
    match name.as_str() {
        "lib" | "main" | "mod" => String::new(),
        name => name.strip_suffix("::mod").unwrap_or(name).to_owned(),
    }
}

/// The imports of a crate; `files` are paths below `src` and texts. The root's own are left out:
/// it only hands on.
pub(crate) fn graph<'a>(files: impl Iterator<Item = (&'a str, &'a str)>) -> Graph {
    let code: BTreeMap<String, String> =
        files.map(|(file, text)| (module(file), code_only(text))).collect();
    let names = Names::of(&code);
    let imports = |of: &String, code: &String| {
        let paths = paths_of_uses(code).into_iter().chain(inline_paths(code));
        let local = paths.filter_map(|path| in_crate(of, &path));
        local.filter_map(|path| names.resolve(&path)).filter(|to| to != of).collect()
    };
    let mut graph: Graph = code.iter().map(|(of, code)| (of.clone(), imports(of, code))).collect();
    graph.insert(String::new(), BTreeSet::new());
    graph
}

/// Modules that import each other, directly or through others, largest group first.
pub(crate) fn circles(graph: &Graph) -> Vec<Vec<String>> {
    let reached: BTreeMap<&String, BTreeSet<&String>> =
        graph.keys().map(|from| (from, reach(graph, from))).collect();
    let mut found: Vec<Vec<String>> = Vec::new();
    for from in graph.keys() {
        let back = reached[from].iter().filter(|to| reached[*to].contains(from));
        let circle: Vec<String> = back.map(|to| (*to).clone()).collect();
        if circle.len() > 1 && !found.contains(&circle) {
            found.push(circle);
        }
    }
    found.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
    found
}

/// All modules that a module imports, or that one of those imports.
fn reach<'a>(graph: &'a Graph, from: &String) -> BTreeSet<&'a String> {
    let (mut reached, mut open) = (BTreeSet::new(), vec![&graph[from]]);
    while let Some(imports) = open.pop() {
        for to in imports {
            if reached.insert(to) {
                open.extend(graph.get(to));
            }
        }
    }
    reached
}

/// The names that a crate's modules define and its root hands on.
struct Names<'a> {
    modules: BTreeSet<&'a str>,
    /// Modules that define a public item of this name.
    defined: BTreeMap<String, BTreeSet<&'a str>>,
    /// For each name in a `use` of the root the module that it is taken from.
    exported: BTreeMap<String, String>,
}

impl<'a> Names<'a> {
    fn of(code: &'a BTreeMap<String, String>) -> Self {
        let mut defined: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        for (module, code) in code {
            for name in code.lines().filter_map(public_item) {
                defined.entry(name).or_default().insert(module);
            }
        }
        let root = code.get("").map_or("", String::as_str);
        let mut exported = BTreeMap::new();
        for path in uses(root).flat_map(|tree| leaves(&tree)) {
            let path = path.trim_start_matches("crate::").trim_start_matches("self::");
            let (home, name) = path.rsplit_once("::").unwrap_or(("", path));
            exported.insert(name.to_owned(), home.to_owned());
        }
        let modules = code.keys().map(String::as_str).collect();
        Self { modules, defined, exported }
    }

    /// The module that a path from the root leads into.
    fn resolve(&self, path: &str) -> Option<String> {
        let mut longest = path;
        loop {
            if self.modules.contains(longest) && !longest.is_empty() {
                return Some(longest.to_owned());
            }
            match longest.rsplit_once("::") {
                Some((shorter, _)) => longest = shorter,
                None => break,
            }
        }
        let home = self.exported.get(longest)?;
        let inside = |module: &&&str| {
            **module == home.as_str()
                || module.strip_prefix(home.as_str()).is_some_and(|rest| rest.starts_with("::"))
        };
        let deeper = self.defined.get(longest).and_then(|at| at.iter().find(inside));
        let own = self.modules.get(home.as_str());
        deeper.or(own).map(|module| (*module).to_owned()).filter(|module| !module.is_empty())
    }
}

/// The name of the public item that begins in this line of code.
fn public_item(line: &str) -> Option<String> {
    let rest = line.trim_start().strip_prefix("pub")?;
    let rest = match rest.strip_prefix('(') {
        Some(scope) => scope.split_once(')')?.1,
        None => rest,
    };
    let mut words = rest.strip_prefix(' ')?.split_whitespace().peekable();
    while let Some(word) = words.next() {
        let constant = word == "const" && words.peek().is_some_and(|next| next.ends_with(':'));
        match word {
            _ if constant => return words.next().map(identifier),
            "const" | "unsafe" | "async" => {}
            "fn" | "struct" | "enum" | "trait" | "type" | "static" => {
                return words.next().map(identifier);
            }
            _ => return None,
        }
    }
    None
}

fn identifier(word: &str) -> String {
    word.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// The trees of all `use` items.
fn uses(code: &str) -> impl Iterator<Item = String> + '_ {
    words(code, "use").filter_map(|at| {
        let (tree, _) = code[at + "use".len()..].split_once(';')?;
        Some(tree.split_whitespace().collect::<Vec<_>>().join(" "))
    })
}

/// Paths of `use` items that begin in the crate.
fn paths_of_uses(code: &str) -> Vec<String> {
    let own = |tree: &String| ["crate::", "super::", "self::"].iter().any(|s| tree.starts_with(s));
    uses(code).filter(own).flat_map(|tree| leaves(&tree)).collect()
}

/// The single paths of a tree, without the names that they get.
fn leaves(tree: &str) -> Vec<String> {
    let Some((head, rest)) = tree.split_once('{') else {
        return vec![tree.split(" as ").next().unwrap_or(tree).trim().to_owned()];
    };
    let rest = rest.rsplit_once('}').map_or(rest, |(inside, _)| inside);
    let (mut found, mut depth, mut item) = (Vec::new(), 0, String::new());
    for c in rest.chars().chain([',']) {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if c == ',' && depth == 0 {
            let inner = std::mem::take(&mut item);
            if !inner.trim().is_empty() {
                found.extend(leaves(&format!("{}{}", head.trim(), inner.trim())));
            }
        } else {
            item.push(c);
        }
    }
    found
}

/// Paths `crate::…` outside of `use` items.
fn inline_paths(code: &str) -> Vec<String> {
    let in_use: Vec<_> =
        words(code, "use").filter_map(|at| Some(at..at + code[at..].find(';')?)).collect();
    let places = words(code, "crate").filter(|at| !in_use.iter().any(|item| item.contains(at)));
    let path = |at: usize| {
        let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        code[at..].split(|c| !is_part(c)).next().unwrap_or_default().trim_end_matches(':')
    };
    places.map(path).filter(|path| path.contains("::")).map(str::to_owned).collect()
}

/// A path as seen from the crate's root.
fn in_crate(module: &str, path: &str) -> Option<String> {
    let (base, rest) = path.split_once("::")?;
    let parent = module.rsplit_once("::").map_or("", |(parent, _)| parent);
    let joined = match base {
        "crate" => return Some(rest.to_owned()),
        "super" => format!("{parent}::{rest}"),
        "self" => format!("{module}::{rest}"),
        _ => return None,
    };
    Some(joined.trim_start_matches(':').to_owned())
}

#[test]
fn circles_are_found_through_every_kind_of_import() {
    let files = [
        ("lib.rs", "mod a;\nmod b;\npub use a::{A, inner::Deep};\npub use b::B;\n"),
        ("a/mod.rs", "use crate::B;\nmod inner;\npub struct A;\n"),
        ("a/inner.rs", "use super::A;\npub(crate) const fn deep() {}\npub struct Deep;\n"),
        ("b.rs", "pub struct B;\nfn f() { crate::c::g(); } // crate::d::g()\n"),
        ("c.rs", "use crate::{\n    Deep,\n    d::{self as other, D},\n};\n"),
        ("d.rs", "pub struct D;\nconst TEXT: &str = \"use crate::c;\";\n"),
    ];
    let graph = graph(files.into_iter());
    let imports = |module: &str| graph[module].iter().map(String::as_str).collect::<Vec<_>>();
    assert_eq!(imports("a"), ["b"]);
    assert_eq!(imports("a::inner"), ["a"]);
    assert_eq!(imports("b"), ["c"]);
    assert_eq!(imports("c"), ["a::inner", "d"]);
    assert!(imports("d").is_empty() && imports("").is_empty());
    assert_eq!(circles(&graph), [["a", "a::inner", "b", "c"]]);
}
