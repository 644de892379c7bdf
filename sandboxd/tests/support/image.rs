//! Makes OCI image layouts: tar archives, their digests, an index.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// How a layer is packed.
#[derive(Clone, Copy, Debug)]
pub enum Packing {
    Plain,
    Gzip,
    Zstd,
}

/// A tar archive that grows.
#[derive(Default)]
pub struct Layer(Vec<u8>);

impl Layer {
    pub fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> &mut Self {
        self.entry(path, b'0', mode, content.len(), "");
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub fn directory(&mut self, path: &str) -> &mut Self {
        self.entry(&format!("{path}/"), b'5', 0o755, 0, "")
    }

    pub fn link(&mut self, path: &str, to: &str) -> &mut Self {
        self.entry(path, b'2', 0o777, 0, to)
    }

    pub fn hard_link(&mut self, path: &str, to: &str) -> &mut Self {
        self.entry(path, b'1', 0o644, 0, to)
    }

    pub fn device(&mut self, path: &str) -> &mut Self {
        self.entry(path, b'3', 0o666, 0, "")
    }

    fn entry(&mut self, path: &str, flag: u8, mode: u32, bytes: usize, link: &str) -> &mut Self {
        let mut header = [0u8; 512];
        header[..path.len()].copy_from_slice(path.as_bytes());
        header[100..108].copy_from_slice(format!("{mode:07o}\0").as_bytes());
        header[124..136].copy_from_slice(format!("{bytes:011o}\0").as_bytes());
        header[136..148].copy_from_slice(b"00000000001\0");
        header[156] = flag;
        header[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header[257..265].copy_from_slice(b"ustar\x0000");
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0.extend_from_slice(&header);
        self
    }
}

/// A layer with bash in it, and what bash is linked with, from the host.
pub fn system() -> Layer {
    let mut layer = Layer::default();
    for name in ["bin", "sbin", "lib", "lib64"] {
        layer.directory(&format!("usr/{name}"));
        layer.link(name, &format!("usr/{name}"));
    }
    let script = "while read -r line; do echo \"$line\"; done < /proc/$$/maps";
    let maps = std::process::Command::new("/bin/bash").args(["-c", script]).output().unwrap();
    let maps = String::from_utf8(maps.stdout).unwrap();
    let mut files: Vec<&str> =
        maps.lines().filter_map(|line| line.split_whitespace().nth(5)).collect();
    files.retain(|path| {
        path.starts_with('/') && !path.contains("locale") && !path.contains("gconv")
    });
    files.sort_unstable();
    files.dedup();
    for path in files {
        let usr = match path.strip_prefix("/usr") {
            Some(_) => path.to_owned(),
            None => format!("/usr{path}"),
        };
        layer.file(&usr[1..], 0o755, &std::fs::read(path).unwrap());
        // The names that programs ask for lead to a version.
        let (path, usr) = (Path::new(path), Path::new(&usr));
        for entry in std::fs::read_dir(path.parent().unwrap()).unwrap().flatten() {
            let leads = entry.path().canonicalize().is_ok_and(|real| real == path);
            if leads && entry.path().is_symlink() {
                let name = usr.with_file_name(entry.file_name());
                layer.link(&name.to_str().unwrap()[1..], usr.to_str().unwrap());
            }
        }
    }
    // Where programs look for the loader, it is often a link.
    for loader in ["/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"] {
        if let Ok(real) = Path::new(loader).canonicalize() {
            let text = real.to_str().unwrap();
            let text = if text.starts_with("/usr") { text.into() } else { format!("/usr{text}") };
            if text != format!("/usr{loader}") {
                layer.link(&format!("usr{loader}"), &text);
            }
        }
    }
    layer
}

/// A layout in `directory` with one image of these layers.
pub fn layout(directory: &Path, layers: Vec<(Layer, Packing)>, env: &[&str]) {
    std::fs::create_dir_all(directory.join("blobs/sha256")).unwrap();
    let (mut descriptors, mut ids) = (Vec::new(), Vec::new());
    for (layer, packing) in layers {
        let mut tar = layer.0;
        tar.resize(tar.len() + 1024, 0);
        ids.push(format!("sha256:{}", hex::encode(Sha256::digest(&tar))));
        let (packed, suffix) = match packing {
            Packing::Plain => (tar, ""),
            Packing::Gzip => {
                let mut writer = flate2::write::GzEncoder::new(Vec::new(), Default::default());
                writer.write_all(&tar).unwrap();
                (writer.finish().unwrap(), "+gzip")
            }
            Packing::Zstd => (zstd::encode_all(&tar[..], 1).unwrap(), "+zstd"),
        };
        let kind = format!("application/vnd.oci.image.layer.v1.tar{suffix}");
        descriptors.push(blob(directory, &kind, &packed));
    }
    let architecture = if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" };
    let config = json!({
        "architecture": architecture,
        "os": "linux",
        "config": { "Env": env },
        "rootfs": { "type": "layers", "diff_ids": ids },
    });
    let config =
        blob(directory, "application/vnd.oci.image.config.v1+json", config.to_string().as_bytes());
    let manifest = json!({ "schemaVersion": 2, "config": config, "layers": descriptors });
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let manifest = blob(directory, kind, manifest.to_string().as_bytes());
    let other = json!({
        "mediaType": kind,
        "digest": format!("sha256:{}", "0".repeat(64)),
        "size": 1,
        "platform": { "architecture": "s390x", "os": "linux" },
    });
    let index = json!({ "schemaVersion": 2, "manifests": [other, manifest] });
    std::fs::write(directory.join("index.json"), index.to_string()).unwrap();
    std::fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

fn blob(directory: &Path, kind: &str, bytes: &[u8]) -> Value {
    let digits = hex::encode(Sha256::digest(bytes));
    std::fs::write(directory.join("blobs/sha256").join(&digits), bytes).unwrap();
    json!({ "mediaType": kind, "digest": format!("sha256:{digits}"), "size": bytes.len() })
}

/// The largest blob: a layer.
pub fn largest_blob(directory: &Path) -> PathBuf {
    let blobs = std::fs::read_dir(directory.join("blobs/sha256")).unwrap().flatten();
    blobs.max_by_key(|blob| blob.metadata().unwrap().len()).unwrap().path()
}
