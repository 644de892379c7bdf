# Packages of the image's own distribution, without their scripts: what dpkg would put below /usr and
# /opt. The image is at /image; only what it lacks is downloaded, and apt verifies signatures.
set -eu
work=/workspace/apt
mkdir -p $work/lists/partial $work/archives/partial $work/tree
set -- -y --no-install-recommends --download-only install -- "$@"
apt() {
    apt-get -q -o Debug::NoLocking=true -o APT::Sandbox::User=root \
        -o Dir::State=$work -o Dir::State::lists=$work/lists \
        -o Dir::State::status=/image/var/lib/dpkg/status \
        -o Dir::State::extended_states=$work/extended \
        -o Dir::Cache=$work -o Dir::Cache::archives=$work/archives \
        -o Dir::Log=$work -o Dpkg::Use-Pty=false \
        ${SSL_CERT_FILE:+-o "Acquire::https::CaInfo=$SSL_CERT_FILE"} \
        ${sources:+-o "Dir::Etc=$sources"} "$@"
}
# Whoever sets APT_CONFIG says in that file where packages come from.
sources=/image/etc/apt
[ -z "${APT_CONFIG-}" ] || sources=
apt -o APT::Update::Error-Mode=any update
apt "$@"
for package in $work/archives/*.deb; do
    [ -e "$package" ] || continue
    dpkg-deb --extract "$package" $work/tree
done
for name in bin sbin lib lib32 lib64 libx32; do
    # On a merged root these are links to what is below /usr.
    if [ -d $work/tree/$name ] && [ -h /$name ]; then
        mkdir -p $work/tree/usr/$name
        cp -a $work/tree/$name/. $work/tree/usr/$name/
    fi
done
for name in usr opt; do
    if [ -d $work/tree/$name ]; then
        cp -a --no-preserve=ownership $work/tree/$name/. /$name/
    fi
done
