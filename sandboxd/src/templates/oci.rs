//! Reads an OCI image layout (the image specification's "Image Layout") and unpacks an image of it.
//!
//! Runs inside a cell, confined as the file tools are: the layout is mounted read-only at
//! [`LAYOUT`], the tree goes into the cell's workspace. Nothing is believed that its digest does
//! not prove: index.json is the operator's, all else is named by it.

use std::fs::File;
use std::io::{self, BufReader, Error, Read};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::place::{Count, Place};
use super::tar::Archive;

/// Where the layout is mounted.
pub const LAYOUT: &str = "/image";
/// index.json, a manifest, a configuration.
const DOCUMENT_BYTES_MAX: u64 = 4 << 20;
/// Registries allow 127.
const LAYERS_MAX: usize = 256;
/// All files of one image.
const IMAGE_BYTES_MAX: u64 = 64 << 30;
/// How deep an index may lie in another.
const NESTED_MAX: usize = 3;
/// Variables of an image: those of a whole toolchain, and no list.
const VARIABLES_MAX: usize = 256;

/// A blob as a document names it.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default)]
    platform: Option<Platform>,
    #[serde(default)]
    annotations: std::collections::BTreeMap<String, String>,
}

#[derive(Clone, Debug, Deserialize)]
struct Platform {
    architecture: String,
    os: String,
}

#[derive(Debug, Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
struct Manifest {
    config: Descriptor,
    layers: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
struct Config {
    architecture: String,
    os: String,
    rootfs: RootFs,
    #[serde(default)]
    config: Option<Settings>,
}

#[derive(Debug, Deserialize)]
struct RootFs {
    diff_ids: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
struct Settings {
    #[serde(rename = "Env", default)]
    env: Option<Vec<String>>,
}

/// What was unpacked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unpacked {
    pub layers: usize,
    pub entries: u64,
    pub bytes: u64,
    pub skipped: u64,
    /// The variables that the image sets.
    pub env: Vec<(String, String)>,
}

/// The digest of the manifest for this machine.
pub fn resolve(layout: &Path) -> io::Result<String> {
    let index: Index = serde_json::from_slice(&document(layout, Path::new("index.json"))?)
        .map_err(|e| wrong(format!("index.json: {e}")))?;
    let mut found = Vec::new();
    manifests(layout, index, 0, &mut found)?;
    match &found[..] {
        [one] => Ok(one.digest.clone()),
        [] => Err(wrong(format!("it has no image for linux on {}", architecture()))),
        several => {
            let name = |found: &Descriptor| {
                let key = "org.opencontainers.image.ref.name";
                found.annotations.get(key).unwrap_or(&found.digest).clone()
            };
            let names: Vec<String> = several.iter().map(name).collect();
            Err(wrong(format!("it has several images for this machine: {}", names.join(", "))))
        }
    }
}

/// Unpacks the image whose manifest has this digest into the empty directory `into`.
pub fn unpack(layout: &Path, digest: &str, into: &Path) -> io::Result<Unpacked> {
    // Its size is what the digest proves anyway.
    let manifest: Manifest = serde_json::from_slice(&blob(layout, digest, None)?)
        .map_err(|e| wrong(format!("manifest {digest}: {e}")))?;
    let config = config(layout, &manifest)?;
    if manifest.layers.len() != config.rootfs.diff_ids.len() || manifest.layers.len() > LAYERS_MAX {
        let (layers, ids) = (manifest.layers.len(), config.rootfs.diff_ids.len());
        return Err(wrong(format!("it has {layers} layers and digests of {ids}")));
    }
    let mut place = Place::open(into, IMAGE_BYTES_MAX)?;
    for (layer, id) in manifest.layers.iter().zip(&config.rootfs.diff_ids) {
        place.next_layer();
        put(layout, layer, id, &mut place)
            .map_err(|e| Error::new(e.kind(), format!("layer {}: {e}", layer.digest)))?;
    }
    let Count { entries, bytes, skipped } = place.finish()?;
    let env = config.config.unwrap_or_default().env.unwrap_or_default();
    let env = env.iter().take(VARIABLES_MAX).filter_map(|text| text.split_once('='));
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    Ok(Unpacked { layers: manifest.layers.len(), entries, bytes, skipped, env })
}

/// The images of an index that this machine could run.
fn manifests(
    layout: &Path,
    index: Index,
    depth: usize,
    found: &mut Vec<Descriptor>,
) -> io::Result<()> {
    for descriptor in index.manifests {
        if descriptor.media_type.ends_with("index.v1+json")
            || descriptor.media_type.ends_with("manifest.list.v2+json")
        {
            if depth == NESTED_MAX {
                return Err(wrong("its indexes are nested too deep".to_owned()));
            }
            let text = blob(layout, &descriptor.digest, Some(descriptor.size))?;
            let index = serde_json::from_slice(&text)
                .map_err(|e| wrong(format!("index {}: {e}", descriptor.digest)))?;
            manifests(layout, index, depth + 1, found)?;
            continue;
        }
        let ours = match &descriptor.platform {
            Some(platform) => platform.os == "linux" && platform.architecture == architecture(),
            None => {
                let text = blob(layout, &descriptor.digest, Some(descriptor.size))?;
                // What is no image, as an attestation, has no such configuration.
                let manifest = serde_json::from_slice::<Manifest>(&text);
                manifest.is_ok_and(|manifest| {
                    config(layout, &manifest).is_ok_and(|config| {
                        config.os == "linux" && config.architecture == architecture()
                    })
                })
            }
        };
        if ours && !found.iter().any(|known| known.digest == descriptor.digest) {
            found.push(descriptor);
        }
    }
    Ok(())
}

fn config(layout: &Path, manifest: &Manifest) -> io::Result<Config> {
    let Descriptor { digest, size, .. } = &manifest.config;
    serde_json::from_slice(&blob(layout, digest, Some(*size))?)
        .map_err(|e| wrong(format!("configuration {digest}: {e}")))
}

/// This machine's architecture as images name it.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Puts one layer, whose digests are looked at when all of it was read: what is wrong is never
/// used, because nothing is until everything was right.
fn put(layout: &Path, layer: &Descriptor, id: &str, place: &mut Place) -> io::Result<()> {
    let file = open(layout, &digest_path(&layer.digest)?)?;
    let bytes = rustix::fs::fstat(&file)?.st_size.cast_unsigned();
    if bytes != layer.size {
        return Err(wrong(format!("it has {bytes} bytes, not {}", layer.size)));
    }
    let mut packed = Hashed::new(BufReader::with_capacity(1 << 17, file));
    let mut whole = Hashed::new(unpacked(&layer.media_type, &mut packed)?);
    let mut archive = Archive::new(&mut whole);
    while let Some(entry) = archive.next_entry()? {
        place
            .put(&entry, &mut archive)
            .map_err(|e| Error::new(e.kind(), format!("{}: {e}", entry.path.display())))?;
    }
    io::copy(&mut whole, &mut io::sink())?;
    let whole = whole.digest();
    io::copy(&mut packed, &mut io::sink())?;
    for (what, found, expected) in [("", packed.digest(), &*layer.digest), ("unpacked ", whole, id)]
    {
        if found != expected {
            return Err(wrong(format!("its {what}digest is {found}, not {expected}")));
        }
    }
    Ok(())
}

fn unpacked<'a>(media_type: &str, packed: &'a mut impl Read) -> io::Result<Box<dyn Read + 'a>> {
    let kind = media_type.rsplit(['.', '+']).next().unwrap_or("");
    Ok(match kind {
        "tar" => Box::new(packed),
        "gzip" => Box::new(flate2::read::MultiGzDecoder::new(packed)),
        "zstd" => Box::new(zstd::stream::read::Decoder::new(packed)?),
        _ => return Err(wrong(format!("layers of the kind {media_type:?} are not read"))),
    })
}

/// A small blob, checked against its digest.
fn blob(layout: &Path, digest: &str, size: Option<u64>) -> io::Result<Vec<u8>> {
    let text = document(layout, &digest_path(digest)?)?;
    if size.is_some_and(|size| size != text.len() as u64) {
        return Err(wrong(format!("{digest} has {} bytes, which is not its size", text.len())));
    }
    let found = format!("sha256:{}", hex::encode(Sha256::digest(&text)));
    if found == digest { Ok(text) } else { Err(wrong(format!("{digest} has the digest {found}"))) }
}

fn document(layout: &Path, path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    open(layout, path)?.take(DOCUMENT_BYTES_MAX + 1).read_to_end(&mut text)?;
    if text.len() as u64 > DOCUMENT_BYTES_MAX {
        return Err(wrong(format!("{} is longer than {DOCUMENT_BYTES_MAX} bytes", path.display())));
    }
    Ok(text)
}

/// Opens a file of the layout, through no link.
fn open(layout: &Path, path: &Path) -> io::Result<File> {
    let named = |e: rustix::io::Errno| {
        let error = Error::from(e);
        Error::new(error.kind(), format!("{}: {error}", path.display()))
    };
    let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let top = rustix::fs::openat(CWD, layout, directory, Mode::empty()).map_err(named)?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    // A pipe must not be waited for.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::openat2(&top, path, flags, Mode::empty(), resolve).map_err(named)?;
    let kind = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
    if kind != rustix::fs::FileType::RegularFile {
        return Err(wrong(format!("{} is no file", path.display())));
    }
    Ok(file.into())
}

/// Where a blob lies. Only SHA-256 is read; the digits are what keeps the path inside.
fn digest_path(digest: &str) -> io::Result<std::path::PathBuf> {
    let digits = digest.strip_prefix("sha256:").filter(|digits| {
        digits.len() == 64 && digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    });
    match digits {
        Some(digits) => Ok(Path::new("blobs/sha256").join(digits)),
        None => Err(wrong(format!("{digest:?} is no SHA-256 digest"))),
    }
}

fn wrong(text: String) -> Error {
    Error::new(io::ErrorKind::InvalidData, text)
}

/// Counts what passes into a digest.
struct Hashed<R> {
    reader: R,
    sum: Sha256,
}

impl<R: Read> Hashed<R> {
    fn new(reader: R) -> Self {
        Self { reader, sum: Sha256::new() }
    }

    fn digest(self) -> String {
        format!("sha256:{}", hex::encode(self.sum.finalize()))
    }
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        self.sum.update(&buffer[..read]);
        Ok(read)
    }
}
