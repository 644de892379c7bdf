//! One thread a processor, each with a runtime of its own, for everything that carries traffic.
//!
//! A connection lives on one of them from its first byte to its last, with the upstream connections
//! it uses: no request waits for another thread to be woken, which costs more than a small request
//! itself. A listener lives on one of them too; what it accepts stays there, unless another one has
//! fewer connections. Everything else (control socket, leases, vault) is the main thread's.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::runtime::{Builder, Handle};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::sys::wipe;

thread_local! {
    static HERE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Which shard this thread is; none on every other thread.
pub fn here() -> Option<usize> {
    HERE.get()
}

struct Shard {
    runtime: Handle,
    connections: Arc<AtomicUsize>,
}

/// The threads. They end with this.
pub struct Shards {
    shards: Vec<Shard>,
    next_listener: AtomicUsize,
    _end: DropGuard,
}

/// A connection's place on a shard.
struct Seat(Arc<AtomicUsize>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A socket that can go from one runtime to another.
pub trait Portable: Sized + Send + 'static {
    type Bare: Send + 'static;
    fn detach(self) -> io::Result<Self::Bare>;
    fn attach(bare: Self::Bare) -> io::Result<Self>;
}

impl Portable for TcpStream {
    type Bare = std::net::TcpStream;
    fn detach(self) -> io::Result<Self::Bare> {
        self.into_std()
    }
    fn attach(bare: Self::Bare) -> io::Result<Self> {
        Self::from_std(bare)
    }
}

impl Portable for UnixStream {
    type Bare = std::os::unix::net::UnixStream;
    fn detach(self) -> io::Result<Self::Bare> {
        self.into_std()
    }
    fn attach(bare: Self::Bare) -> io::Result<Self> {
        Self::from_std(bare)
    }
}

impl Portable for UnixListener {
    type Bare = std::os::unix::net::UnixListener;
    fn detach(self) -> io::Result<Self::Bare> {
        self.into_std()
    }
    fn attach(bare: Self::Bare) -> io::Result<Self> {
        Self::from_std(bare)
    }
}

/// The socket, as the other runtime's.
pub fn moved<S: Portable>(socket: S, runtime: &Handle) -> io::Result<S> {
    let bare = socket.detach()?;
    let _inside = runtime.enter();
    S::attach(bare)
}

impl Shards {
    /// Starts the threads; call after this process was confined, so that they are too.
    pub fn start() -> io::Result<Self> {
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        let end = CancellationToken::new();
        let shards = (0..count).map(|index| start_one(index, end.clone()));
        Ok(Self {
            shards: shards.collect::<io::Result<_>>()?,
            next_listener: AtomicUsize::new(0),
            _end: end.drop_guard(),
        })
    }

    /// Where the next listener is to live.
    pub fn for_listener(&self) -> &Handle {
        let turn = self.next_listener.fetch_add(1, Ordering::Relaxed);
        &self.shards[turn % self.shards.len()].runtime
    }

    /// Serves a connection where fewest are, and where it was accepted when that is no worse.
    pub fn serve<S, F, W>(&self, tasks: &TaskTracker, socket: S, work: W)
    where
        S: Portable,
        W: FnOnce(S) -> F + Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let index = self.choose();
        let shard = &self.shards[index];
        shard.connections.fetch_add(1, Ordering::Relaxed);
        let seat = Seat(Arc::clone(&shard.connections));
        if here() == Some(index) {
            tasks.spawn(async move {
                work(socket).await;
                drop(seat);
            });
            return;
        }
        // A socket that a runtime does not let go or take is closed, as if it had not come.
        let Ok(bare) = socket.detach() else { return };
        let moved = async move {
            if let Ok(socket) = S::attach(bare) {
                work(socket).await;
            }
            drop(seat);
        };
        tasks.spawn_on(moved, &shard.runtime);
    }

    fn choose(&self) -> usize {
        let load = |index: &usize| self.shards[*index].connections.load(Ordering::Relaxed);
        let least = (0..self.shards.len()).min_by_key(load).unwrap_or(0);
        here().filter(|here| load(here) <= load(&least)).unwrap_or(least)
    }
}

fn start_one(index: usize, end: CancellationToken) -> io::Result<Shard> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    std::thread::Builder::new().name(format!("traffic-{index}")).spawn(move || {
        HERE.set(Some(index));
        let _keeping = wipe::keep_blocks();
        runtime.block_on(end.cancelled());
        // What still hangs in a lookup of the host's resolver must not keep the thread.
        runtime.shutdown_background();
    })?;
    Ok(Shard { runtime: handle, connections: Arc::default() })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn connections_are_spread_over_the_shards_and_work_there() {
        let shards = Shards::start().unwrap();
        let tasks = TaskTracker::new();
        let (seen, mut places) = mpsc::unbounded_channel();
        let mut clients = Vec::new();
        for _ in 0..shards.shards.len() * 2 {
            let (mut client, server) = UnixStream::pair().unwrap();
            let seen = seen.clone();
            shards.serve(&tasks, server, move |mut server: UnixStream| async move {
                let mut byte = [0u8; 1];
                server.read_exact(&mut byte).await.unwrap();
                seen.send(here()).unwrap();
                server.write_all(&byte).await.unwrap();
                let _ = server.read(&mut byte).await;
            });
            client.write_all(b"x").await.unwrap();
            clients.push(client);
        }

        let mut used = Vec::new();
        for client in &mut clients {
            client.read_exact(&mut [0u8; 1]).await.unwrap();
            used.push(places.recv().await.unwrap().expect("it is a shard's thread"));
        }
        drop(clients);
        tasks.close();
        tasks.wait().await;

        assert_eq!(used.iter().collect::<BTreeSet<_>>().len(), shards.shards.len());
        let left: usize = shards.shards.iter().map(|s| s.connections.load(Ordering::Relaxed)).sum();
        assert_eq!(left, 0);
    }
}
