// node provider.mjs PACKAGES PORT ISSUER: an OpenID provider with short tokens. Prints a refresh token
// as the authorization code flow would have given it, then serves.
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const [packages, port, issuer] = process.argv.slice(2);
const entry = createRequire(`${packages}/node_modules/`).resolve('oidc-provider');
const { Provider } = await import(pathToFileURL(entry));
const secret = process.env.CLIENT_SECRET;
const provider = new Provider(issuer, {
  clients: [
    { client_id: 'service', client_secret: secret, grant_types: ['client_credentials'], redirect_uris: [], response_types: [] },
    {
      client_id: 'person', client_secret: secret, grant_types: ['authorization_code', 'refresh_token'],
      response_types: ['code'], redirect_uris: ['https://person.example/cb'],
      token_endpoint_auth_method: 'client_secret_post',
    },
  ],
  scopes: ['openid', 'offline_access', 'files'],
  rotateRefreshToken: true,
  issueRefreshToken: async () => true,
  ttl: { AccessToken: 5, ClientCredentials: 5, RefreshToken: 3600, Grant: 3600, Session: 3600 },
  features: {
    devInteractions: { enabled: false },
    clientCredentials: { enabled: true },
    introspection: { enabled: true, allowedPolicy: async () => true },
  },
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id }) }),
  cookies: { keys: ['only for tests'] },
});
provider.proxy = true;
const client = await provider.Client.find('person');
const grant = new provider.Grant({ accountId: 'somebody', clientId: 'person' });
grant.addOIDCScope('openid offline_access files');
const grantId = await grant.save();
const refresh = new provider.RefreshToken({
  accountId: 'somebody', client, grantId, gty: 'authorization_code', scope: 'openid offline_access files',
});
const token = await refresh.save();
provider.listen(Number(port), '127.0.0.1', () => console.log(`REFRESH ${token}`));
