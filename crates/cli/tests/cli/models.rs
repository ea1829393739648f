//! What `plan` and `bench` take for a model.

use std::fs;

use serde_json::Value;

use crate::{Folder, ok, refused, text, write};

#[test]
fn a_map_of_names_to_shapes_is_a_model_in_its_order() {
    let folder = Folder::new();
    let (list, map) = (folder.path("list.json"), folder.path("map.json"));
    fs::write(&list, r#"[{"name":"w","shape":[2,3]},{"name":"b","shape":[]}]"#).unwrap();
    fs::write(&map, " {\"w\": [2, 3],\n \"b\": []} ").unwrap();
    assert_eq!(ok(&["plan", text(&map)]), ok(&["plan", text(&list)]));
    for (shapes, said) in [
        (r#"{"w":[2,-3]}"#, "`w`: expected a list of extents such as [10, 64], found [2,-3]"),
        (r#"{"w":3}"#, "`w`: expected a list of extents such as [10, 64], found 3"),
        (r#"{"w":[1],"w":[2]}"#, "parameter `w` is registered twice"),
        (r#"{"w":[1]"#, "or {\"name\": […], …}"),
    ] {
        fs::write(&map, shapes).unwrap();
        let error = refused(&["plan", text(&map)]);
        assert!(error.contains(said), "{shapes}: {error}");
    }
}

#[test]
fn an_index_of_files_is_the_model_in_them() {
    let folder = Folder::new();
    let tensors = [("a", vec![1.0f32; 4]), ("b", vec![2.0; 70_000]), ("c", vec![3.0; 5])];
    let whole = folder.path("model.safetensors");
    write(&whole, &tensors);
    write(&folder.path("model-1.safetensors"), &[tensors[2].clone(), tensors[0].clone()]);
    write(&folder.path("model-2.safetensors"), &tensors[1..2]);
    let index = folder.path("model.safetensors.index.json");
    let map = |b: &str| {
        let map = format!(
            r#"{{"metadata":{{"total_size":1}},"weight_map":{{"c":"model-1.safetensors",
            "b":"{b}","a":"model-1.safetensors"}}}}"#
        );
        fs::write(&index, map).unwrap();
    };
    map("model-2.safetensors");
    assert_eq!(ok(&["plan", text(&index)]), ok(&["plan", text(&whole)]));
    let timed = ok(&["bench", text(&index), "--rounds", "1", "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&timed).unwrap()["parameters"], 3);
    for (file, said) in [
        ("model-3.safetensors", "model-3.safetensors: cannot open"),
        ("model-1.safetensors", "`b`: expected the tensor in"),
        ("../model-2.safetensors", "`b`: expected the name of a file beside the index"),
    ] {
        map(file);
        let error = refused(&["plan", text(&index)]);
        assert!(error.contains(said), "{file}: {error}");
    }
    fs::write(&index, r#"{"weight_map":{"a":3}}"#).unwrap();
    assert!(refused(&["plan", text(&index)]).contains("weight_map: expected {\"tensor\""));
}
