// Package kvloop is a client of kvloop's RouterService, for agents with a tokenizer, and of its ChatService (DialChats),
// for those without.
//
//	client, err := kvloop.Dial([]string{"127.0.0.1:7600"})
//	session, err := client.OpenSession(ctx, kvloop.Conversation{ID: "agent-1"})
//	stream, err := session.Generate(ctx, kvloop.Turn{Prompt: ids})
//	for {
//		event, err := stream.Recv() // io.EOF after the summary
//	}
//	released, err := session.Close(ctx)
//
// Calls that fail with UNAVAILABLE or RESOURCE_EXHAUSTED before their first answer are tried again by gRPC itself,
// at another router when there are several. grpc-go older than 1.40 does so only where the environment has
// GRPC_GO_RETRY=on. Failures are *Error.
package kvloop

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/balancer/roundrobin"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	pb "kvloop/clients/go/kvloopv1alpha1"
)

const (
	maxMessageBytes = 16 << 20
	turnTimeout     = 10 * time.Minute
	callTimeout     = 10 * time.Second

	// Four tries; newer attempts of a request_id take over from older ones, so that none is served twice.
	serviceConfig = `{
		"loadBalancingConfig": [{"` + roundrobin.Name + `": {}}],
		"retryThrottling": {"maxTokens": 100, "tokenRatio": 0.1},
		"methodConfig": [{
			"name": [{"service": "kvloop.v1alpha1.RouterService"}, {"service": "kvloop.v1alpha1.ChatService"}],
			"retryPolicy": {
				"maxAttempts": 4,
				"initialBackoff": "0.2s",
				"maxBackoff": "2s",
				"backoffMultiplier": 2,
				"retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]
			}
		}]
	}`
)

// Client is a client of one fleet's routers. It is safe for concurrent use.
type Client struct {
	connection *grpc.ClientConn
	router     pb.RouterServiceClient
}

type options struct {
	token string
	tls   *tls.Config
	dial  []grpc.DialOption
}

// Option is an option of Dial.
type Option func(*options)

// WithToken gives the tenant's token.
func WithToken(token string) Option { return func(o *options) { o.token = token } }

// WithTLS connects over TLS; &tls.Config{} trusts the system's roots.
func WithTLS(config *tls.Config) Option { return func(o *options) { o.tls = config } }

// WithDialOptions adds gRPC's own options, behind the package's.
func WithDialOptions(dial ...grpc.DialOption) Option {
	return func(o *options) { o.dial = append(o.dial, dial...) }
}

// Dial returns a client of the routers at some host:port; turns are spread over those that answer. It connects in
// the background.
func Dial(targets []string, opts ...Option) (*Client, error) {
	connection, err := connect(targets, opts)
	if err != nil {
		return nil, err
	}
	return &Client{connection, pb.NewRouterServiceClient(connection)}, nil
}

func connect(targets []string, opts []Option) (*grpc.ClientConn, error) {
	if len(targets) == 0 {
		return nil, errors.New("kvloop: a client needs a host:port")
	}
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	addresses := make([]resolver.Address, len(targets))
	for i, target := range targets {
		host, _, err := net.SplitHostPort(target)
		if err != nil {
			return nil, err
		}
		// The name that a certificate is checked against.
		addresses[i] = resolver.Address{Addr: target, ServerName: host}
	}
	routers := manual.NewBuilderWithScheme("kvloop")
	routers.InitialState(resolver.State{Addresses: addresses})

	options := []grpc.DialOption{
		grpc.WithResolvers(routers),
		grpc.WithDefaultServiceConfig(serviceConfig),
		// Routers expect no more than a ping in ten seconds.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 20 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true,
		}),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(maxMessageBytes),
			grpc.MaxCallSendMsgSize(maxMessageBytes),
			// What is larger is not tried again.
			grpc.MaxRetryRPCBufferSize(maxMessageBytes),
		),
	}
	if o.tls != nil {
		options = append(options, grpc.WithTransportCredentials(credentials.NewTLS(o.tls)))
	} else {
		options = append(options, grpc.WithInsecure())
	}
	if o.token != "" {
		options = append(options, grpc.WithPerRPCCredentials(bearer{o.token, o.tls != nil}))
	}
	return grpc.Dial("kvloop:///routers", append(options, o.dial...)...)
}

// Close closes the connections; what is under way is cancelled.
func (c *Client) Close() error { return c.connection.Close() }

// Router returns the stub, for calls that this package has no words for.
func (c *Client) Router() pb.RouterServiceClient { return c.router }

// Conversation names a conversation within the tenant.
type Conversation struct {
	ID        string
	Model     string
	Adapter   string
	CacheSalt string
}

// End lets go of what is held for a conversation; false when nothing was.
func (c *Client) End(ctx context.Context, conversation Conversation) (bool, error) {
	ctx, cancel := withDefaultTimeout(ctx, callTimeout)
	defer cancel()
	answer, err := c.router.EndConversation(ctx, &pb.EndConversationRequest{
		ConversationId: conversation.ID,
		Model:          conversation.Model,
		Adapter:        conversation.Adapter,
		CacheSalt:      conversation.CacheSalt,
	})
	return answer.GetReleased(), failed(err)
}

// Get returns what is held for a conversation; nil when nothing is.
func (c *Client) Get(ctx context.Context, conversation Conversation) (*pb.LeaseInfo, error) {
	ctx, cancel := withDefaultTimeout(ctx, callTimeout)
	defer cancel()
	answer, err := c.router.GetConversation(ctx, &pb.GetConversationRequest{
		ConversationId: conversation.ID,
		Model:          conversation.Model,
		Adapter:        conversation.Adapter,
		CacheSalt:      conversation.CacheSalt,
	})
	var e *Error
	if err = failed(err); errors.As(err, &e) && e.Reason == ReasonConversationNotFound {
		return nil, nil
	}
	return answer.GetLease(), err
}

func withDefaultTimeout(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, timeout)
}

// bearer puts a token into every call's metadata.
type bearer struct {
	token  string
	secure bool
}

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + b.token}, nil
}

func (b bearer) RequireTransportSecurity() bool { return b.secure }
