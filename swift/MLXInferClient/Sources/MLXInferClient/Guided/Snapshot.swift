/// An answer of a type while it is written.
public struct Snapshot<Value: Decodable & Sendable & JSONSchemaProviding>: Sendable {
    /// The value so far: for a ``GuidedObject`` its properties as optionals. What is whole in it does not change any more.
    public let content: Value.PartiallyGenerated
    /// The whole value; only in the last snapshots, once the answer has ended.
    public let value: Value?
    /// The answer so far: text, reasoning, and with the last snapshot its usage.
    public let response: ChatResponse
}

extension EventBuffer {
    /// Keeps the newest snapshot only: it has all that the others have.
    static func newest<Value>() -> EventBuffer<Snapshot<Value>> where Element == Snapshot<Value> {
        EventBuffer(limit: 1) { snapshot, waiting in
            waiting = [snapshot]
            return true
        }
    }
}

/// Makes snapshots of the events of an answer. A piece takes a time that does not grow with the text before it, but for copying lists.
struct SnapshotMaker<Value: Decodable & Sendable & JSONSchemaProviding>: Sendable {
    private(set) var response = ChatResponse()
    private var json = PartialJSON()
    private var last: PartialJSONValue?
    private var value: Value?

    /// The next snapshot; nil if the event does not change what can be seen.
    ///
    /// - Throws: ``MLXInferError/undecodableAnswer(text:reason:)`` at the end of an answer that is not such a value.
    mutating func add(_ event: ChatEvent) throws -> Snapshot<Value>? {
        response.add(event)
        switch event {
        case .text(let piece): json.feed(piece)
        case .finished(let reason) where reason != .toolCalls:
            value = try response.decoded(as: Value.self)
            json.feed("\n")  // ends a number
        case .usage where value != nil: return try snapshot(json.value)
        default: return nil
        }
        guard value != nil || json.value != last else { return nil }
        return try snapshot(json.value)
    }

    private mutating func snapshot(_ json: PartialJSONValue?) throws -> Snapshot<Value>? {
        last = json
        if let content = json.flatMap({ Value.partiallyGenerated(from: $0) }) {
            return Snapshot(content: content, value: value, response: response)
        }
        guard value == nil else {
            throw MLXInferError.undecodableAnswer(text: response.text, reason: "it is not of type \(Value.PartiallyGenerated.self)")
        }
        return nil
    }
}

/// Reads the events of an answer as snapshots.
struct SnapshotReader<Value: Decodable & Sendable & JSONSchemaProviding>: EventReader, Sendable {
    private var events = ChatStream()
    private var maker = SnapshotMaker<Value>()

    var partial: String { events.partial }
    var isFinished: Bool { events.isFinished }

    mutating func read(_ data: [UInt8], into output: inout [Snapshot<Value>]) throws {
        var arrived: [ChatEvent] = []
        try events.read(data, into: &arrived)
        for event in arrived { if let snapshot = try maker.add(event) { output.append(snapshot) } }
    }
}
