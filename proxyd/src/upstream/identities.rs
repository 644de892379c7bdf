//! Client configurations for each certificate that credentials show.
//!
//! One for each way and certificate, kept while connections come: a configuration has its own store
//! of sessions to resume, so one that was begun in the name of one client is never taken up in
//! another's, nor after the certificate was replaced.

use std::sync::{Arc, Mutex};

use foldhash::HashMap;

use super::trust::{Offers, TrustError};
use super::way::Way;
use crate::vault::Shown;

/// Most configurations kept; with more they are made anew.
const KEPT_MAX: usize = 256;

/// A way, and what identifies the certificate.
type Key = (Arc<Way>, [u8; 32]);

#[derive(Default)]
pub struct Identities(Mutex<HashMap<Key, Arc<Offers>>>);

impl Identities {
    /// What is offered on that way in the name of that client.
    pub fn offers(&self, way: &Arc<Way>, shown: &Shown) -> Result<Arc<Offers>, TrustError> {
        let mut kept = self.0.lock().expect("no holder of this lock panics");
        let key = (Arc::clone(way), shown.id);
        if let Some(offers) = kept.get(&key) {
            return Ok(Arc::clone(offers));
        }
        let offers = Arc::new(way.offers.showing(shown.resolver())?);
        if kept.len() >= KEPT_MAX {
            kept.clear();
        }
        kept.insert(key, Arc::clone(&offers));
        Ok(offers)
    }
}
