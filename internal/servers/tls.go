package servers

import (
	"fmt"
	"os"
)

// TLS names the files, in PEM format, with which one side of a connection proves who
// it is and checks the other.
type TLS struct {
	CA   string // who must have signed the other side's certificate
	Cert string // this side's own
	Key  string
}

// copyTo copies the files into a folder, for a server that must own its key.
func (f TLS) copyTo(in *folder, owner *account) (TLS, error) {
	dir, err := in.sub("tls", owner)
	if err != nil {
		return TLS{}, fmt.Errorf("copy certificates: %w", err)
	}
	out := TLS{CA: dir + "/ca.pem", Cert: dir + "/cert.pem", Key: dir + "/key.pem"}
	for from, to := range map[string]string{f.CA: out.CA, f.Cert: out.Cert, f.Key: out.Key} {
		content, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(to, content, 0o600)
		}
		if err == nil && owner != nil {
			err = os.Chown(to, int(owner.uid), int(owner.gid))
		}
		if err != nil {
			return TLS{}, fmt.Errorf("copy certificates: %w", err)
		}
	}
	return out, nil
}
