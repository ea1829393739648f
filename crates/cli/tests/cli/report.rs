//! The page of a run: curves by update and rank, and what repeats the run.

use std::fs;

use crate::{Folder, ok, text};

/// Titles of a page's charts.
fn titles(page: &str) -> Vec<&str> {
    let captions = page.split("<figcaption>").skip(1);
    captions.map(|rest| rest.split('<').next().unwrap()).collect()
}

#[test]
fn a_page_has_curves_of_the_run_and_of_every_rank() {
    let folder = Folder::new();
    let report = folder.path("report.html");
    let train = ["train", "--epochs", "2", "--ranks", "2", "--clip-norm", "1", "--update-norms"];
    ok(&[&train[..], &["--report", text(&report)]].concat());
    let page = fs::read_to_string(&report).unwrap();
    let found = titles(&page);
    for title in ["loss", "learning rate", "gradient norm", "update norm"] {
        assert!(found.contains(&title), "{title}: {found:?}");
    }
    assert!(
        found.contains(&"update norm of each tensor") && page.contains("\nlayer0.weight\n</text>")
    );
    let of_rank = |rank: &str| found.iter().filter(|title| title.starts_with(rank)).count();
    assert_eq!((of_rank("rank 0"), of_rank("rank 1"), of_rank("whole batches")), (1, 1, 1));
    // What was neither scaled nor skipped has no curve.
    assert!(!found.contains(&"loss scale") && !found.contains(&"share skipped"), "{found:?}");
    for told in ["<code>fusestep train --epochs 2 --ranks 2", "processors", "2 (thread)"] {
        assert!(page.contains(told), "{told}");
    }
    // A row of means for each part that has run, with a cell for each rank.
    let update = page.split("<tr><td>update</td>").nth(1).unwrap().split("</tr>").next().unwrap();
    assert_eq!(update.matches("<td class=\"n\">").count(), 2, "{update}");
    assert!(!page.contains("NaN") && !page.contains("http"));
}

#[test]
fn a_page_of_one_rank_shows_skipped_updates_and_one_without_updates_has_no_curves() {
    let folder = Folder::new();
    let (report, saved) = (folder.path("report.html"), folder.path("saved"));
    let train = ["train", "--epochs", "1", "--report", text(&report)];
    let scaled = ["--dtype", "f16", "--loss-scale", "8.507059173023462e37"];
    ok(&[&train[..], &scaled].concat());
    let page = fs::read_to_string(&report).unwrap();
    let found = titles(&page);
    assert!(found.contains(&"share skipped") && found.contains(&"loss scale"), "{found:?}");
    assert!(!found.contains(&"gradient norm"), "no norm was finite: {found:?}");
    let saves = ["--checkpoint", text(&saved)];
    ok(&[&train[..], &saves].concat());
    ok(&[&train[..], &saves, &["--resume"]].concat());
    let page = fs::read_to_string(&report).unwrap();
    assert_eq!(titles(&page), Vec::<&str>::new());
    assert!(page.contains("test accuracy") && page.contains("--resume</code>"), "{page}");
}
