package servers

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// Certificates makes a certificate authority and two certificates that it has signed, as files
// in dir: a server's for the hosts, which are names or addresses, and a client's.
func Certificates(dir string, hosts ...string) (server, client TLS, err error) {
	ca, err := issue(dir, "ca", nil)
	if err != nil {
		return server, client, err
	}
	ours, err := issue(dir, "server", ca, hosts...)
	if err != nil {
		return server, client, err
	}
	theirs, err := issue(dir, "client", ca)
	if err != nil {
		return server, client, err
	}
	return ours.files, theirs.files, nil
}

// issued is a certificate with its key, and where they are.
type issued struct {
	files TLS
	cert  *x509.Certificate
	key   *ecdsa.PrivateKey
}

// issue makes a certificate that ca signs, or itself if that is nil.
func issue(dir, name string, ca *issued, hosts ...string) (*issued, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the key of %s: %w", name, err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 64))
	if err != nil {
		return nil, fmt.Errorf("make the certificate of %s: %w", name, err)
	}
	cert := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "onejob test " + name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(24 * time.Hour),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			cert.IPAddresses = append(cert.IPAddresses, ip)
		} else {
			cert.DNSNames = append(cert.DNSNames, h)
		}
	}
	made := &issued{cert: cert, key: key}
	made.files.Cert, made.files.Key = filepath.Join(dir, name+".pem"), filepath.Join(dir, name+".key")
	if ca == nil {
		ca = made
		cert.IsCA, cert.BasicConstraintsValid, cert.ExtKeyUsage = true, true, nil
		cert.KeyUsage |= x509.KeyUsageCertSign
	}
	made.files.CA = ca.files.Cert
	der, err := x509.CreateCertificate(rand.Reader, cert, ca.cert, &key.PublicKey, ca.key)
	if err != nil {
		return nil, fmt.Errorf("make the certificate of %s: %w", name, err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("write the key of %s: %w", name, err)
	}
	for path, block := range map[string]*pem.Block{
		made.files.Cert: {Type: "CERTIFICATE", Bytes: der},
		made.files.Key:  {Type: "PRIVATE KEY", Bytes: private},
	} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			return nil, fmt.Errorf("write the certificate of %s: %w", name, err)
		}
	}
	return made, nil
}
