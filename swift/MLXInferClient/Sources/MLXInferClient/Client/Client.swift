import Foundation

/// A server of mlxinfer, or another that speaks OpenAI's HTTP, seen from an app.
///
/// A client is a value without state: make one wherever it is needed. Every request has a connection of its own, and a thread that waits
/// for it; none blocks the threads that Swift's tasks share. Cancelling the task, or dropping the stream, closes the connection, and the
/// server stops the request at once.
///
/// ```swift
/// let client = Client(.default)
/// for try await event in client.chat([.user("Hello")]) {
///     if case .text(let piece) = event { print(piece, terminator: "") }
/// }
/// ```
public struct Client: Sendable {
    public var endpoint: Endpoint
    /// The model of requests that name none; nil is the first that the server has.
    public var model: String?
    public var timeouts: Timeouts
    public var reconnect: Reconnect

    public init(
        _ endpoint: Endpoint = .default, model: String? = nil, timeouts: Timeouts = Timeouts(), reconnect: Reconnect = Reconnect()
    ) {
        (self.endpoint, self.model, self.timeouts, self.reconnect) = (endpoint, model, timeouts, reconnect)
    }
}

extension Client {
    func exchange(_ waker: Waker) -> Exchange {
        Exchange(endpoint: endpoint, timeouts: timeouts, reconnect: reconnect, waker: waker)
    }

    /// A POST whose answer is a stream. The model's name is looked up first where nobody gave one.
    func events<Events: EventReader & Sendable>(
        _ path: String, model: String?, reader: Events, _ buffer: EventBuffer<Events.Output>,
        body: @escaping @Sendable (String) -> JSONValue
    ) -> AnswerEvents<Events.Output> where Events.Output: Sendable {
        let client = self
        return IOThread.events(buffer) { waker, emit in
            let exchange = client.exchange(waker)
            let name = try client.name(model, exchange)
            let request = Request(method: "POST", path: path, accept: "text/event-stream", body: try body(name).encoded())
            try exchange.run(request, with: StreamedAnswer(reader), emit: emit)
        }
    }

    /// The model that a request is for.
    func name(_ model: String?, _ exchange: Exchange) throws -> String {
        if let name = model ?? self.model { return name }
        guard let model = try Self.modelList(exchange).first else { throw MLXInferError.protocolViolation("the server has no model") }
        return model.id
    }

    static func modelList(_ exchange: Exchange) throws -> [Model] { try get("/v1/models", exchange, as: ModelList.self).data }

    static func get(_ path: String, _ exchange: Exchange) throws -> [UInt8] { try whole(Request(path: path), exchange) }

    static func get<Value: Decodable>(_ path: String, _ exchange: Exchange, as type: Value.Type) throws -> Value {
        try decoded(whole(Request(path: path), exchange), of: path)
    }

    static func post<Value: Decodable>(_ path: String, _ body: JSONValue, _ exchange: Exchange, as type: Value.Type) throws -> Value {
        try decoded(whole(Request(method: "POST", path: path, body: body.encoded()), exchange), of: path)
    }

    private static func whole(_ request: Request, _ exchange: Exchange) throws -> [UInt8] {
        var body: [UInt8] = []
        try exchange.run(request, with: WholeAnswer()) { body = $0 }
        return body
    }

    private static func decoded<Value: Decodable>(_ body: [UInt8], of path: String) throws -> Value {
        do {
            return try JSONDecoder().decode(Value.self, from: Data(body))
        } catch let error as DecodingError {
            throw MLXInferError.protocolViolation("the answer to \(path) cannot be read: \(error.reason)")
        }
    }
}
