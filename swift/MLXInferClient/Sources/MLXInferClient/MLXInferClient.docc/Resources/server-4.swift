import Foundation
import MLXInferClient

guard let group = FileManager.default.containerURL(forSecurityApplicationGroupIdentifier: "ABCDE12345.chat") else {
    fatalError("the entitlement for the app group is missing")
}
let client = Client(.unix(path: group.appending(path: "mlxinfer/api.sock").path))
try await client.waitUntilReady()
let answer = try await client.respond(to: "Hello")
print(answer.text)
