//! (sys)
